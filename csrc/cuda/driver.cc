#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstring>

#include "common/error.h"

namespace adaptive::cuda {
namespace {

struct Symbol {
  const char* name;
  const char* older;  // a name with the same meaning, where older drivers have only that
};

template <typename Function>
void find_symbol(void* library, const std::string& path, const Symbol& symbol, Function& function) {
  void* found = ::dlsym(library, symbol.name);
  if (found == nullptr && symbol.older != nullptr) {
    found = ::dlsym(library, symbol.older);
  }
  if (found == nullptr) {
    throw Error("the CUDA driver " + path + " has no " + symbol.name + ": it is too old");
  }
  function = reinterpret_cast<Function>(found);
}

Api find_all(void* library, const std::string& path) {
  Api api{};
  const auto find = [&](auto& function, const char* name, const char* older = nullptr) {
    find_symbol(library, path, {name, older}, function);
  };
  find(api.init, "cuInit");
  find(api.get_error_name, "cuGetErrorName");
  find(api.get_error_string, "cuGetErrorString");
  find(api.device_get_count, "cuDeviceGetCount");
  find(api.device_get, "cuDeviceGet");
  find(api.device_get_uuid, "cuDeviceGetUuid_v2", "cuDeviceGetUuid");  // knows parts of a GPU
  find(api.device_can_access_peer, "cuDeviceCanAccessPeer");
  find(api.primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  find(api.primary_ctx_release, "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease");
  find(api.ctx_push, "cuCtxPushCurrent_v2");
  find(api.ctx_pop, "cuCtxPopCurrent_v2");
  find(api.mem_alloc, "cuMemAlloc_v2");
  find(api.mem_free, "cuMemFree_v2");
  find(api.copy_to_device, "cuMemcpyHtoDAsync_v2");
  find(api.copy_to_host, "cuMemcpyDtoHAsync_v2");
  find(api.copy, "cuMemcpyDtoDAsync_v2");
  find(api.ipc_get_mem, "cuIpcGetMemHandle");
  find(api.ipc_open_mem, "cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle");
  find(api.ipc_close_mem, "cuIpcCloseMemHandle");
  find(api.ipc_get_event, "cuIpcGetEventHandle");
  find(api.ipc_open_event, "cuIpcOpenEventHandle");
  find(api.stream_create, "cuStreamCreate");
  find(api.stream_destroy, "cuStreamDestroy_v2");
  find(api.stream_wait_event, "cuStreamWaitEvent");
  find(api.event_create, "cuEventCreate");
  find(api.event_destroy, "cuEventDestroy_v2");
  find(api.event_record, "cuEventRecord");
  find(api.event_query, "cuEventQuery");
  return api;
}

}  // namespace

std::shared_ptr<const Driver> Driver::load(const std::string& library) {
  void* const opened = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    const char* const words = ::dlerror();
    throw Error("the CUDA driver cannot be opened: " +
                std::string(words == nullptr ? library.c_str() : words));
  }
  std::shared_ptr<Driver> driver(new Driver);
  driver->api_ = find_all(opened, library);
  driver->check(driver->api_.init(0), "cuInit", "0");
  return driver;
}

void Driver::check(Result result, const char* call, const std::string& argument) const {
  if (result == kSuccess) {
    return;
  }
  const char* name = nullptr;
  const char* text = nullptr;
  if (api_.get_error_name(result, &name) != kSuccess || name == nullptr) {
    name = "an error without a name";
  }
  if (api_.get_error_string(result, &text) != kSuccess || text == nullptr) {
    text = "the driver says no more";
  }
  throw Error(std::string(call) + "(" + argument + ") failed: " + text + " (" + name + ", " +
              std::to_string(result) + ")");
}

Device Driver::device(int ordinal) const {
  Device device = -1;
  check(api_.device_get(&device, ordinal), "cuDeviceGet", std::to_string(ordinal));
  return device;
}

Uuid Driver::uuid(Device device) const {
  Uuid uuid{};
  check(api_.device_get_uuid(&uuid, device), "cuDeviceGetUuid", std::to_string(device));
  return uuid;
}

Device Driver::find(const Uuid& wanted) const {
  int count = 0;
  check(api_.device_get_count(&count), "cuDeviceGetCount", "");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const Device found = device(ordinal);
    const Uuid its = uuid(found);
    if (std::memcmp(its.bytes, wanted.bytes, sizeof(its.bytes)) == 0) {
      return found;
    }
  }
  return -1;
}

bool Driver::can_access_peer(Device device, Device peer) const {
  int can = 0;
  check(api_.device_can_access_peer(&can, device, peer), "cuDeviceCanAccessPeer",
        std::to_string(device) + ", " + std::to_string(peer));
  return can != 0;
}

}  // namespace adaptive::cuda
