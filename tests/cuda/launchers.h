// Behind kernels.cu: each kernel as a function of the host.
extern "C" unsigned kv_copy_bytes() { return sizeof(KvCopy); }
#define KV_FIELD(name) {#name, __builtin_offsetof(KvCopy, name)}
static const struct { const char* name; unsigned offset; } kv_fields[] = {
    KV_FIELD(chunk), KV_FIELD(planes), KV_FIELD(units), KV_FIELD(n_planes), KV_FIELD(n_units), KV_FIELD(block_units),
    KV_FIELD(block_stride), KV_FIELD(unit_stride), KV_FIELD(axis_size), KV_FIELD(axis_stride), KV_FIELD(run),
    KV_FIELD(page_units), KV_FIELD(chunk_page_stride), KV_FIELD(chunk_plane_stride), KV_FIELD(chunk_unit_stride)};
extern "C" const char* kv_field(unsigned number, unsigned* offset) {
    if (number >= sizeof kv_fields / sizeof *kv_fields) return nullptr;
    *offset = kv_fields[number].offset;
    return kv_fields[number].name;
}
typedef void (*Kernel)(KvCopy);
static void walk(Kernel kernel, unsigned grid, unsigned block, const KvCopy* copy) {
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) kernel(*copy);
}
#define KV_WALK(name) \
    extern "C" void walk_##name(unsigned grid, unsigned block, const KvCopy* copy) { walk(name, grid, block, copy); }
KV_WALK(kv_gather_16) KV_WALK(kv_gather_8) KV_WALK(kv_gather_4) KV_WALK(kv_gather_2) KV_WALK(kv_gather_1)
KV_WALK(kv_scatter_16) KV_WALK(kv_scatter_8) KV_WALK(kv_scatter_4) KV_WALK(kv_scatter_2) KV_WALK(kv_scatter_1)
