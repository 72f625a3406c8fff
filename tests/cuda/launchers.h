// Behind kernels.cu: each kernel as a function of the host.
extern "C" unsigned kv_copy_bytes() { return sizeof(KvCopy); }
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
