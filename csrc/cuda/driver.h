// The CUDA driver, opened at run time: nothing of CUDA is needed to build this, and a machine
// without it only lacks what is in this folder. The declarations below are our own, of the few
// entry points that are called; they follow the driver's binary interface, which does not change
// under a name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace adaptive::cuda {

using Result = int;
using Device = int;
using Address = unsigned long long;  // of memory of a device
struct ContextHandle;
struct StreamHandle;
struct EventHandle;

struct Uuid {
  unsigned char bytes[16];
};
// What another process opens; passed by value, as the driver wants it.
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
constexpr unsigned kEnablePeerAccess = 1;  // of cuIpcOpenMemHandle

// The entry points, named as the driver names them but for `cu` and versions.
struct Api {
  Result (*init)(unsigned flags);
  Result (*get_error_name)(Result result, const char** name);
  Result (*get_error_string)(Result result, const char** text);
  Result (*device_get_count)(int* count);
  Result (*device_get)(Device* device, int ordinal);
  Result (*device_get_uuid)(Uuid* uuid, Device device);
  Result (*device_can_access_peer)(int* can, Device device, Device peer);
  Result (*primary_ctx_retain)(ContextHandle** context, Device device);
  Result (*primary_ctx_release)(Device device);
  Result (*ctx_push)(ContextHandle* context);
  Result (*ctx_pop)(ContextHandle** context);
  Result (*mem_alloc)(Address* address, std::size_t size_bytes);
  Result (*mem_free)(Address address);
  Result (*copy_to_device)(Address to, const void* from, std::size_t size_bytes,
                           StreamHandle* stream);
  Result (*copy_to_host)(void* to, Address from, std::size_t size_bytes, StreamHandle* stream);
  Result (*copy)(Address to, Address from, std::size_t size_bytes, StreamHandle* stream);
  Result (*ipc_get_mem)(MemoryExport* handle, Address address);
  Result (*ipc_open_mem)(Address* address, MemoryExport handle, unsigned flags);
  Result (*ipc_close_mem)(Address address);
  Result (*ipc_get_event)(EventExport* handle, EventHandle* event);
  Result (*ipc_open_event)(EventHandle** event, EventExport handle);
  Result (*stream_create)(StreamHandle** stream, unsigned flags);
  Result (*stream_destroy)(StreamHandle* stream);
  Result (*stream_wait_event)(StreamHandle* stream, EventHandle* event, unsigned flags);
  Result (*event_create)(EventHandle** event, unsigned flags);
  Result (*event_destroy)(EventHandle* event);
  Result (*event_record)(EventHandle* event, StreamHandle* stream);
  Result (*event_query)(EventHandle* event);
};

// An initialized driver. It stays loaded until the process ends: its threads do.
class Driver {
 public:
  // Opens `library`, a name or a path. Throws Error that says what is missing.
  static std::shared_ptr<const Driver> load(const std::string& library);

  const Api& api() const noexcept { return api_; }

  // Throws Error with the call's name, its argument and the driver's words unless it went well.
  void check(Result result, const char* call, const std::string& argument) const;

  Device device(int ordinal) const;
  Uuid uuid(Device device) const;
  // The device of that identity that this process sees; -1 where it sees none.
  Device find(const Uuid& uuid) const;
  bool can_access_peer(Device device, Device peer) const;

 private:
  Driver() = default;
  Api api_{};
};

}  // namespace adaptive::cuda
