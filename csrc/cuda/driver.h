// The CUDA driver, opened at run time. CUDA is therefore not needed for the build, and on a machine
// without CUDA, only the functions of this folder are unavailable. The declarations below are this
// project's own and cover only the functions that are called. They follow the driver's binary
// interface, which is stable for each name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace adaptive::cuda {

using Result = int;
using Device = int;
using Address = unsigned long long;  // address of device memory
struct ContextHandle;
struct StreamHandle;
struct EventHandle;

// Called by a thread of the driver; it must not call the driver.
using HostFunction = void(void* data);

struct Uuid {
  unsigned char bytes[16];
};
// A handle that another process can open. The driver requires that it is passed by value.
struct MemoryExport {
  unsigned char bytes[64];
};
struct EventExport {
  unsigned char bytes[64];
};
static_assert(sizeof(Uuid) == 16 && sizeof(MemoryExport) == 64 && sizeof(EventExport) == 64,
              "the driver's binary interface");

constexpr const char* kDriverName = "libcuda.so.1";
constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;
constexpr unsigned kNonBlockingStream = 1;
constexpr unsigned kEventWithoutTime = 2;
constexpr unsigned kEventBetweenProcesses = 4;
constexpr unsigned kEnablePeerAccess = 1;  // a flag of cuIpcOpenMemHandle

// The driver's functions: name in this file, name in the driver, name in older drivers if it
// differs, and parameters. The function that returns UUIDs also supports parts of a GPU (MIG).
#define ADAPTIVE_CUDA_CALLS(CALL)                                                                 \
  CALL(init, "cuInit", nullptr, unsigned flags)                                                   \
  CALL(get_error_name, "cuGetErrorName", nullptr, Result result, const char** name)               \
  CALL(get_error_string, "cuGetErrorString", nullptr, Result result, const char** text)           \
  CALL(device_get_count, "cuDeviceGetCount", nullptr, int* count)                                 \
  CALL(device_get, "cuDeviceGet", nullptr, Device* device, int ordinal)                           \
  CALL(device_get_uuid, "cuDeviceGetUuid_v2", "cuDeviceGetUuid", Uuid* uuid, Device device)       \
  CALL(device_can_access_peer, "cuDeviceCanAccessPeer", nullptr, int* can, Device device,         \
       Device peer)                                                                               \
  CALL(primary_ctx_retain, "cuDevicePrimaryCtxRetain", nullptr, ContextHandle** context,          \
       Device device)                                                                             \
  CALL(primary_ctx_release, "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease",          \
       Device device)                                                                             \
  CALL(ctx_push, "cuCtxPushCurrent_v2", nullptr, ContextHandle* context)                          \
  CALL(ctx_pop, "cuCtxPopCurrent_v2", nullptr, ContextHandle** context)                           \
  CALL(mem_alloc, "cuMemAlloc_v2", nullptr, Address* address, std::size_t size_bytes)             \
  CALL(mem_free, "cuMemFree_v2", nullptr, Address address)                                        \
  CALL(copy_to_device, "cuMemcpyHtoDAsync_v2", nullptr, Address to, const void* from,             \
       std::size_t size_bytes, StreamHandle* stream)                                              \
  CALL(copy_to_host, "cuMemcpyDtoHAsync_v2", nullptr, void* to, Address from,                     \
       std::size_t size_bytes, StreamHandle* stream)                                              \
  CALL(copy, "cuMemcpyDtoDAsync_v2", nullptr, Address to, Address from, std::size_t size_bytes,   \
       StreamHandle* stream)                                                                      \
  CALL(ipc_get_mem, "cuIpcGetMemHandle", nullptr, MemoryExport* handle, Address address)          \
  CALL(ipc_open_mem, "cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle", Address* address,             \
       MemoryExport handle, unsigned flags)                                                       \
  CALL(ipc_close_mem, "cuIpcCloseMemHandle", nullptr, Address address)                            \
  CALL(ipc_get_event, "cuIpcGetEventHandle", nullptr, EventExport* handle, EventHandle* event)    \
  CALL(ipc_open_event, "cuIpcOpenEventHandle", nullptr, EventHandle** event, EventExport handle)  \
  CALL(stream_create, "cuStreamCreate", nullptr, StreamHandle** stream, unsigned flags)           \
  CALL(stream_destroy, "cuStreamDestroy_v2", nullptr, StreamHandle* stream)                       \
  CALL(stream_wait_event, "cuStreamWaitEvent", nullptr, StreamHandle* stream, EventHandle* event, \
       unsigned flags)                                                                            \
  CALL(event_create, "cuEventCreate", nullptr, EventHandle** event, unsigned flags)               \
  CALL(event_destroy, "cuEventDestroy_v2", nullptr, EventHandle* event)                           \
  CALL(event_record, "cuEventRecord", nullptr, EventHandle* event, StreamHandle* stream)          \
  CALL(event_query, "cuEventQuery", nullptr, EventHandle* event)                                  \
  CALL(launch_host, "cuLaunchHostFunc", nullptr, StreamHandle* stream, HostFunction* function,    \
       void* data)

struct Api {
#define ADAPTIVE_DECLARE(member, name, older, ...) Result (*member)(__VA_ARGS__);
  ADAPTIVE_CUDA_CALLS(ADAPTIVE_DECLARE)
#undef ADAPTIVE_DECLARE
};

// An initialized driver. It stays loaded until the process exits, because its threads do not stop.
class Driver {
 public:
  // Opens `library`, which is a name or a path. If the library or a function is missing, throws
  // Error with its name.
  static std::shared_ptr<const Driver> load(const std::string& library);

  const Api& api() const noexcept { return api_; }

  // Throws Error with the call's name, its argument and the driver's text if the call failed.
  void check(Result result, const char* call, const std::string& argument) const;

  Device device(int ordinal) const;
  Uuid uuid(Device device) const;
  // Returns this process's number for the device with this identity, or -1 if the process does not
  // see the device.
  Device find(const Uuid& uuid) const;
  bool can_access_peer(Device device, Device peer) const;

 private:
  Driver() = default;
  Api api_{};
};

}  // namespace adaptive::cuda
