// The layout of DLPack, https://dmlc.github.io/dlpack: how array libraries lend each other memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/message.h"

namespace adaptive {

struct DlDevice {
  std::int32_t type;
  std::int32_t id;
};
struct DlType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t dimensions;
  DlType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
// The unversioned form, which every consumer takes.
struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor*);
};
struct DlVersion {
  std::uint32_t major;
  std::uint32_t minor;
};
struct DlManagedVersioned {
  DlVersion version;
  void* context;
  void (*deleter)(DlManagedVersioned*);
  std::uint64_t flags;
  DlTensor tensor;
};
// What a library offers to callers in C. Only the functions that are called here have their types.
struct DlExchange {
  DlVersion version;
  const void* previous;
  void (*allocate)();
  void (*managed_from_object)();
  int (*managed_to_object)(DlManagedVersioned* tensor, void** object);
  int (*tensor_from_object)(void* object, DlTensor* tensor);
  void (*current_stream)();
};
static_assert(sizeof(void*) != 8 || (sizeof(DlManagedTensor) == 64 &&
                                     sizeof(DlManagedVersioned) == 80 && sizeof(DlExchange) == 56),
              "the layouts are DLPack's");

constexpr std::int32_t kDlCpu = 1;
constexpr std::uint8_t kDlInt = 0, kDlUint = 1, kDlFloat = 2, kDlBfloat = 4, kDlBool = 6,
                       kDlFloat8E4m3fn = 10, kDlFloat8E5m2 = 12;

// Fills in a contiguous tensor of the CPU; `shape` and `strides` have room for kMaxDimensions.
inline void fill_dlpack(DlTensor& tensor, std::int64_t* shape, std::int64_t* strides, void* data,
                        const Message& message) {
  std::int64_t stride = 1;
  for (int i = message.dimensions - 1; i >= 0; --i) {
    shape[i] = message.shape[i];
    strides[i] = stride;
    stride *= message.shape[i] == 0 ? 1 : message.shape[i];
  }
  tensor.data = data;
  tensor.device = {kDlCpu, 0};
  tensor.dimensions = message.dimensions;
  tensor.dtype = {dlpack_code(message.dtype),
                  static_cast<std::uint8_t>(8 * element_bytes(message.dtype)), 1};
  tensor.shape = shape;
  tensor.strides = strides;
  tensor.byte_offset = 0;
}

}  // namespace adaptive
