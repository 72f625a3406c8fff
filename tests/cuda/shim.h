// Lets g++ build kernels.cu: CUDA's words as nothing, and launchers that walk the grid thread by thread. Good for
// kernels without barriers, shuffles and shared memory only.
#pragma once
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
struct Dim { unsigned x = 1, y = 1, z = 1; };
static thread_local Dim threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
template <typename T> static inline T __ldcs(const T* from) { return *from; }
template <typename T> static inline void __stcs(T* to, T value) { *to = value; }
