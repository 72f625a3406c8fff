// Paged KV <-> chunk, as bytes: one body for every engine's layout, which is told by strides alone.
//
// A plane is what one layer has of K, of V, or of both, where they lie together. It consists of units: blocks, parts of
// blocks, or tokens. A unit is `axes` of runs, each run in one piece; in the chunk a unit is one piece.
//
//   paged  planes[plane] + number / block_units * block_stride + number % block_units * unit_stride
//                        + sum(index[axis] * axis_stride[axis]) + byte of the run
//   chunk  chunk + unit / page_units * chunk_page_stride + plane * chunk_plane_stride
//                + unit % page_units * chunk_unit_stride + byte of the unit
//
// with number = units[unit]; a negative one is passed over. Sizes and strides are in bytes and multiples of the vector
// that a kernel copies by, so are addresses; whoever launches checks that, and that numbers exist.
//
// No barriers, no shuffles, no shared memory: each lane's work is its own, so a host's compiler can build this too.

typedef long long i64;
typedef unsigned u32;

enum { LANES = 32, IN_FLIGHT = 4, AXES = 4 };

struct KvCopy {  // words of 8 bytes only, as whoever launches lays it out
    char* chunk;
    char* const* planes;
    const i64* units;
    i64 n_planes, n_units;
    i64 block_units, block_stride, unit_stride;
    i64 axis_size[AXES], axis_stride[AXES];  // outermost first; one that is not there has size 1
    i64 run;
    i64 page_units, chunk_page_stride, chunk_plane_stride, chunk_unit_stride;
};
static_assert(sizeof(KvCopy) == 8 * (13 + 2 * AXES), "KvCopy has padding");

// A warp takes a part of a unit at a time, the next one grid-stride: any grid copies everything, so a small one leaves
// the other multiprocessors to the engine. Bytes are read once and written once, so caches are told to let them go.
template <typename Vec, bool GATHER>
static __device__ __forceinline__ void copy(const KvCopy& c) {
    const u32 warps = blockDim.x / LANES, lane = threadIdx.x % LANES;
    const u32 units = (u32)c.n_units, block_units = (u32)c.block_units, page_units = (u32)c.page_units;
    const u32 run = (u32)(c.run / (i64)sizeof(Vec));
    u32 vectors = run;
#pragma unroll
    for (int axis = 0; axis < AXES; ++axis) vectors *= (u32)c.axis_size[axis];
    const u32 parts = (vectors + LANES * IN_FLIGHT - 1) / (LANES * IN_FLIGHT);
    const u32 items = (u32)c.n_planes * units * parts;
    for (u32 item = blockIdx.x * warps + threadIdx.x / LANES; item < items; item += gridDim.x * warps) {
        const u32 row = item / parts, part = item % parts;
        const u32 plane = row / units, unit = row % units;
        const i64 number = c.units[unit];
        if (number < 0) continue;
        char* const paged = c.planes[plane] + (u32)number / block_units * c.block_stride +
                            (u32)number % block_units * c.unit_stride;
        char* const flat = c.chunk + unit / page_units * c.chunk_page_stride + plane * c.chunk_plane_stride +
                           unit % page_units * c.chunk_unit_stride;
        const u32 first = part * (LANES * IN_FLIGHT) + lane;
        i64 offset[IN_FLIGHT];
        Vec held[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
            const u32 at = first + k * LANES;
            offset[k] = (i64)at * (i64)sizeof(Vec);
            if (vectors != run) {
                u32 rest = at / run;
                offset[k] = (i64)(at % run) * (i64)sizeof(Vec);
#pragma unroll
                for (int axis = AXES - 1; axis >= 0; --axis) {
                    const u32 size = (u32)c.axis_size[axis];
                    if (size == 1) continue;
                    offset[k] += rest % size * c.axis_stride[axis];
                    rest /= size;
                }
            }
            if (at < vectors) held[k] = __ldcs((const Vec*)(GATHER ? paged + offset[k] : flat + at * sizeof(Vec)));
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
            const u32 at = first + k * LANES;
            if (at < vectors) __stcs((Vec*)(GATHER ? flat + at * sizeof(Vec) : paged + offset[k]), held[k]);
        }
    }
}

#define KV_KERNELS(width, Vec)                                                                                       \
    extern "C" __global__ void __launch_bounds__(1024) kv_gather_##width(const __grid_constant__ KvCopy c) {         \
        copy<Vec, true>(c);                                                                                          \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(1024) kv_scatter_##width(const __grid_constant__ KvCopy c) {        \
        copy<Vec, false>(c);                                                                                         \
    }

KV_KERNELS(16, uint4)
KV_KERNELS(8, uint2)
KV_KERNELS(4, unsigned)
KV_KERNELS(2, unsigned short)
KV_KERNELS(1, unsigned char)
