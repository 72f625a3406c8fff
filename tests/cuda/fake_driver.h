// A libcuda whose device is the host: calls are checked as the driver would, kernels are walked thread by thread, what
// was asked for is written down. Strict where the real one is lenient. Behind kernels.cu and launchers.h.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

typedef unsigned long long u64;
typedef void* Handle;
enum { OK = 0, INVALID = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, BAD_DEVICE = 101, BAD_IMAGE = 200, BAD_CONTEXT = 201,
       BAD_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, REGISTERED = 712, NOT_REGISTERED = 713, FAILED = 719 };

static struct State {
    bool initialised = false;
    int version = 12080, failing_code = 0, retained = 0;
    std::string failing, log;
    std::set<Handle> streams, events, modules;
    std::map<u64, size_t> memory, registered;
    std::atomic<bool> busy{false}, waits{false};
} state;

static thread_local std::vector<Handle> contexts;
static std::recursive_mutex mutex;
static char context, other_context;
static int failing(const char* name) { return state.failing == name ? state.failing_code : OK; }
static void note(const std::string& what) { state.log += what + "\n"; }
static std::string text(u64 number) { return std::to_string(number); }
static bool known(const std::set<Handle>& all, Handle one) { return all.count(one) > 0; }
static bool is_stream(Handle one) { return (u64)one <= 2 || known(state.streams, one); }
static Handle made(std::set<Handle>& all) { return *all.insert(malloc(1)).first; }

#define BEGIN                                          \
    std::lock_guard<std::recursive_mutex> held(mutex); \
    if (int code = failing(__func__)) return code;     \
    if (!state.initialised) return NOT_INITIALIZED;
#define INSIDE                                                                     \
    BEGIN if (contexts.empty() || contexts.back() != &context) return BAD_CONTEXT;

struct Kernels { const char* name; Kernel kernel; };
static Kernels kernels[] = {
#define KV_ENTRY(width) {"kv_gather_" #width, kv_gather_##width}, {"kv_scatter_" #width, kv_scatter_##width},
    KV_ENTRY(16) KV_ENTRY(8) KV_ENTRY(4) KV_ENTRY(2) KV_ENTRY(1) {"packed", nullptr}};

struct Packed { signed char a; int b; float c; double d; u64 e; } packed;
struct Attributes { int order, source[2], target[2]; unsigned flags; };

extern "C" {
void fake_reset() {
    state.version = 12080, state.failing = "", state.log = "", contexts.clear(), state.busy = false;
    state.retained = 0, state.registered.clear(), state.initialised = false;
    state.streams.clear(), state.events.clear(), state.modules.clear(), state.memory.clear();
}
void fake_version(int version) { state.version = version; }
void fake_fail(const char* name, int code) { state.failing = name, state.failing_code = code; }
void fake_busy(int busy) { state.busy = busy; }
int fake_waits() { return state.waits; }
void fake_enter_other() { contexts.push_back(&other_context); }
int fake_depth() { return (int)contexts.size(); }
int fake_retained() { return state.retained; }
int fake_left() { return (int)(state.streams.size() + state.events.size() + state.modules.size() + state.memory.size()); }
const char* fake_log() { return state.log.c_str(); }
const Packed* fake_packed() { return &packed; }

int cuGetErrorName(int code, const char** name) {
    *name = code == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : code == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND" : nullptr;
    return *name ? OK : INVALID;
}
int cuGetErrorString(int code, const char** words) {
    *words = code == NO_DEVICE ? "no CUDA-capable device is detected" : nullptr;
    return *words ? OK : INVALID;
}
int cuInit(unsigned flags) {
    if (int code = failing(__func__)) return code;
    state.initialised = flags == 0;
    return flags ? INVALID : OK;
}
int cuDriverGetVersion(int* version) {
    if (int code = failing(__func__)) return code;
    return *version = state.version, OK;
}
int cuDeviceGetCount(int* count) { BEGIN return *count = 2, OK; }
int cuDeviceGet(int* device, int number) { BEGIN return *device = number + 10, number == 0 || number == 1 ? OK : BAD_DEVICE; }
int cuDeviceGetName(char* name, int size, int device) { BEGIN return snprintf(name, size, "Fake H%d", device), OK; }
int cuDeviceGetAttribute(int* value, int which, int) {
    BEGIN
    *value = which == 16 ? 132 : which == 75 ? 9 : which == 76 ? 0 : -1;
    return *value < 0 ? INVALID : OK;
}
int cuDevicePrimaryCtxRetain(Handle* to, int device) { BEGIN return ++state.retained, *to = &context, device < 10; }
int cuDevicePrimaryCtxRelease_v2(int device) { BEGIN return --state.retained, device < 10; }
int cuCtxPushCurrent_v2(Handle which) { BEGIN return contexts.push_back(which), OK; }
int cuCtxPopCurrent_v2(Handle* which) { INSIDE return *which = &context, contexts.pop_back(), OK; }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { INSIDE return *least = 0, *greatest = -5, OK; }

int cuModuleLoadData(Handle* module, const void* image) {
    INSIDE
    if (memcmp(image, "\x7f" "ELF", 4)) return BAD_IMAGE;
    return *module = made(state.modules), OK;
}
int cuModuleUnload(Handle module) { INSIDE return state.modules.erase(module) ? OK : BAD_HANDLE; }
int cuModuleGetFunction(Handle* function, Handle module, const char* name) {
    INSIDE
    if (!known(state.modules, module)) return BAD_HANDLE;
    for (Kernels& each : kernels)
        if (!strcmp(each.name, name)) return *function = &each, OK;
    return NOT_FOUND;
}
int cuLaunchKernel(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, Handle stream, void** arguments, void** extra) {
    INSIDE
    if (!gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || shared || extra) return INVALID;
    if (!is_stream(stream)) return BAD_HANDLE;
    const Kernels* each = (const Kernels*)function;
    note(std::string("launch ") + each->name + " " + text(gx) + " " + text(bx) + " " + text((u64)stream));
    if (each->kernel) {
        KvCopy copy;
        memcpy((void*)&copy, arguments[0], sizeof copy);
        walk(each->kernel, gx, bx, &copy);
    } else {
        memcpy(&packed.a, arguments[0], 1), memcpy(&packed.b, arguments[1], 4), memcpy(&packed.c, arguments[2], 4);
        memcpy(&packed.d, arguments[3], 8), memcpy(&packed.e, arguments[4], 8);
    }
    return OK;
}

int cuStreamCreateWithPriority(Handle* stream, unsigned flags, int priority) {
    INSIDE
    *stream = made(state.streams);
    note("stream " + text(flags) + " " + std::to_string(priority));
    return OK;
}
int cuStreamDestroy_v2(Handle stream) { INSIDE return state.streams.erase(stream) ? OK : BAD_HANDLE; }
int cuStreamQuery(Handle stream) { INSIDE return !is_stream(stream) ? BAD_HANDLE : state.busy ? NOT_READY : OK; }
static int until_idle() {
    state.waits = true;
    for (int i = 0; i < 10000 && state.busy; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    state.waits = false;
    return state.busy ? FAILED : OK;
}
int cuStreamSynchronize(Handle stream) {
    { INSIDE if (!is_stream(stream)) return BAD_HANDLE; }
    return until_idle();
}
int cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
    INSIDE
    note("wait " + text((u64)stream) + " " + text((u64)event));
    return !is_stream(stream) || !known(state.events, event) ? BAD_HANDLE : flags ? INVALID : OK;
}
int cuEventCreate(Handle* event, unsigned flags) { INSIDE return *event = made(state.events), flags != 3; }
int cuEventDestroy_v2(Handle event) { INSIDE return state.events.erase(event) ? OK : BAD_HANDLE; }
int cuEventRecord(Handle event, Handle stream) {
    INSIDE
    note("record " + text((u64)event) + " " + text((u64)stream));
    return is_stream(stream) && known(state.events, event) ? OK : BAD_HANDLE;
}
int cuEventQuery(Handle event) { INSIDE return !known(state.events, event) ? BAD_HANDLE : state.busy ? NOT_READY : OK; }
int cuEventSynchronize(Handle event) {
    { INSIDE if (!known(state.events, event)) return BAD_HANDLE; }
    return until_idle();
}

int cuMemAlloc_v2(u64* address, size_t size) {
    INSIDE
    if (!size || posix_memalign((void**)address, 256, size)) return INVALID;
    return state.memory[*address] = size, OK;
}
int cuMemFree_v2(u64 address) {
    INSIDE
    if (!state.memory.erase(address)) return INVALID;
    return free((void*)address), OK;
}
int cuMemcpyAsync(u64 to, u64 from, size_t size, Handle stream) {
    INSIDE
    if (!is_stream(stream)) return BAD_HANDLE;
    note("copy " + text(size));
    return memcpy((void*)to, (const void*)from, size), OK;
}
static int batch_as_of_12080(u64* to, u64* from, size_t* sizes, size_t count, Attributes* attributes, size_t* first,
                             size_t numbers, size_t* failed, Handle stream) {
    if (int code = failing("cuMemcpyBatchAsync")) return code;
    if (!known(state.streams, stream)) return BAD_HANDLE;
    if (numbers != 1 || first[0] != 0 || attributes->order != 1 || attributes->flags || !count || !failed) return INVALID;
    note("batch " + text(count));
    for (size_t i = 0; i < count; ++i) {
        if (!sizes[i]) return *failed = i, INVALID;
        memcpy((void*)to[i], (const void*)from[i], sizes[i]);
    }
    return OK;
}
int cuGetProcAddress_v2(const char* name, Handle* function, int version, u64 flags, int* found) {
    if (int code = failing(__func__)) return code;
    bool there = !strcmp(name, "cuMemcpyBatchAsync") && version == 12080 && state.version >= 12080 && !flags;
    *function = there ? (Handle)batch_as_of_12080 : nullptr;
    return *found = !there, there ? OK : NOT_FOUND;
}
int cuMemHostRegister_v2(u64 address, size_t size, unsigned flags) {
    INSIDE
    note("register " + text(size) + " " + text(flags));
    return state.registered.emplace(address, size).second ? OK : REGISTERED;
}
int cuMemHostUnregister(u64 address) { INSIDE return state.registered.erase(address) ? OK : NOT_REGISTERED; }
int cuMemHostGetDevicePointer_v2(u64* there, u64 address, unsigned flags) {
    INSIDE
    return *there = address, state.registered.count(address) && !flags ? OK : INVALID;
}
}
