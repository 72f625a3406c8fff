// A compiler that compiles nothing: what it would be told to make, and how often, is in what it returns.
#include <cstdio>
#include <cstring>
#include <string>
#ifndef MAJOR
#define MAJOR 12
#endif
#ifndef ARCHITECTURES
#define ARCHITECTURES 80, 86, 90, 100, 120
#endif
struct Program { std::string source, name, result, log; };
static int compiled = 0;
static const int known[] = {ARCHITECTURES};
extern "C" {
int fake_compiled() { return compiled; }
const char* nvrtcGetErrorString(int code) { return code == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_ELSE"; }
int nvrtcVersion(int* major, int* minor) { return *major = MAJOR, *minor = 9, 0; }
int nvrtcGetNumSupportedArchs(int* count) { return *count = sizeof known / sizeof *known, 0; }
int nvrtcGetSupportedArchs(int* to) { return memcpy(to, known, sizeof known), 0; }
int nvrtcCreateProgram(Program** program, const char* source, const char* name, int headers, const char**, const char**) {
    return *program = new Program{source, name, "", ""}, headers;
}
int nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, 0; }
int nvrtcCompileProgram(Program* program, int count, const char** options) {
    if (program->source.find("mistake") != std::string::npos)
        return program->log = program->name + "(3): error: a mistake", 6;
    program->result = "\x7f" "ELF";
    for (int i = 0; i < count; ++i) program->result += std::string(" ") + options[i];
    program->result += " " + std::to_string(++compiled);
    return 0;
}
int nvrtcGetProgramLogSize(Program* program, size_t* size) { return *size = program->log.size() + 1, 0; }
int nvrtcGetProgramLog(Program* program, char* to) { return memcpy(to, program->log.c_str(), program->log.size() + 1), 0; }
int nvrtcGetCUBINSize(Program* program, size_t* size) {
#ifdef HUGE_CUBIN
    return *size = (size_t)1 << 40, 0;
#endif
    return *size = program->result.size(), 0;
}
int nvrtcGetCUBIN(Program* program, char* to) { return memcpy(to, program->result.data(), program->result.size()), 0; }
}
