#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstring>

#include "common/error.h"

namespace adaptive::cuda {
namespace {

template <typename Function>
void find(void* library, const std::string& path, const char* name, const char* older,
          Function& function) {
  void* found = ::dlsym(library, name);
  if (found == nullptr && older != nullptr) {
    found = ::dlsym(library, older);
  }
  if (found == nullptr) {
    throw Error("the CUDA driver " + path + " has no " + name + ": it is too old");
  }
  function = reinterpret_cast<Function>(found);
}

Api find_all(void* library, const std::string& path) {
  Api api{};
#define ADAPTIVE_FIND(member, name, older, ...) find(library, path, name, older, api.member);
  ADAPTIVE_CUDA_CALLS(ADAPTIVE_FIND)
#undef ADAPTIVE_FIND
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
    name = "an unknown error";
  }
  if (api_.get_error_string(result, &text) != kSuccess || text == nullptr) {
    text = "the driver gives no text";
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
