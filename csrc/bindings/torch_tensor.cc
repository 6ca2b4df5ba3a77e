#include "bindings/torch_tensor.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>

#include "bindings/dlpack.h"
#include "common/error.h"

namespace py = pybind11;

namespace adaptive {
namespace {

constexpr std::uint32_t kMajor = 1;
constexpr std::uint32_t kMinor = 3;
constexpr const char* kTableName = "dlpack_exchange_api";

// Of torch, which is never unloaded. Written once, with the GIL.
const DlExchange* exchange = nullptr;

struct ElementCode {
  std::uint8_t code;
  std::uint8_t bits;
  ElementType dtype;
  std::uint8_t variant;
};

// Variants as in megatron/adaptive/transport/header.py. Complex types are missing on purpose.
constexpr ElementCode kElements[] = {
    {kDlFloat, 32, ElementType::kFloat32, 0},      {kDlBfloat, 16, ElementType::kBFloat16, 0},
    {kDlFloat, 16, ElementType::kFloat16, 0},      {kDlFloat, 64, ElementType::kFloat64, 0},
    {kDlInt, 64, ElementType::kInt64, 0},          {kDlInt, 32, ElementType::kInt32, 0},
    {kDlInt, 16, ElementType::kInt16, 0},          {kDlInt, 8, ElementType::kInt8, 0},
    {kDlUint, 8, ElementType::kUInt8, 0},          {kDlBool, 8, ElementType::kBool, 0},
    {kDlFloat8E4m3fn, 8, ElementType::kFloat8, 1}, {kDlFloat8E5m2, 8, ElementType::kFloat8, 2},
};

const ElementCode* find_element(DlType dtype) noexcept {
  for (const ElementCode& element : kElements) {
    if (element.code == dtype.code && element.bits == dtype.bits && dtype.lanes == 1) {
      return &element;
    }
  }
  return nullptr;
}

struct Managed {
  DlManagedVersioned head{};
  Lease lease;
  std::int64_t shape[kMaxDimensions];
  std::int64_t strides[kMaxDimensions];
};

void delete_managed(DlManagedVersioned* head) {
  delete static_cast<Managed*>(head->context);
}

bool use_torch(const py::object& capsule) {
  auto* const table =
      static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule.ptr(), kTableName));
  if (table == nullptr) {
    throw py::error_already_set();
  }
  const bool known = table->version.major == kMajor && table->managed_to_object != nullptr &&
                     table->tensor_from_object != nullptr;
  exchange = known ? table : nullptr;
  return known;
}

}  // namespace

bool read_tensor(PyObject* tensor, Message& message, const void** data) {
  if (exchange == nullptr) {
    return false;
  }
  DlTensor found;
  if (exchange->tensor_from_object(tensor, &found) != 0) {
    PyErr_Clear();  // of a type that DLPack does not know: the caller's other way says more
    return false;
  }
  const ElementCode* const element = find_element(found.dtype);
  if (element == nullptr || found.device.type != kDlCpu || found.dimensions > kMaxDimensions) {
    return false;
  }
  std::int64_t count = 1;
  for (int i = found.dimensions - 1; i >= 0; --i) {
    const std::int64_t size = found.shape[i];
    if (size != 1 && found.strides != nullptr && found.strides[i] != count) {
      return false;
    }
    message.shape[i] = size;
    count *= size;
  }
  if (count < 2) {
    return false;  // a single one may be a part of a complex number that is to be negated
  }
  message.dimensions = static_cast<std::uint8_t>(found.dimensions);
  message.dtype = element->dtype;
  message.variant = element->variant;
  message.nbytes = static_cast<std::uint64_t>(count) * element_bytes(element->dtype);
  *data = static_cast<const std::byte*>(found.data) + found.byte_offset;
  return true;
}

py::object make_tensor(Lease&& lease, const Message& message) {
  if (exchange == nullptr) {
    throw std::runtime_error("tensors can be made only after use_torch()");
  }
  auto managed = std::make_unique<Managed>();
  managed->head.version = {kMajor, kMinor};
  managed->head.context = managed.get();
  managed->head.deleter = &delete_managed;
  fill_dlpack(managed->head.tensor, managed->shape, managed->strides, lease.data(), message);
  managed->lease = std::move(lease);
  void* made = nullptr;
  if (exchange->managed_to_object(&managed.release()->head, &made) != 0) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(made));
}

void bind_torch_tensor(py::module_& module) {
  module.def("use_torch", &use_torch, py::arg("exchange_api"),
             R"(Takes torch.Tensor.__dlpack_c_exchange_api__; whether its version is known here.

After True, Arrival.tensor() and Node.send_tensor() can be used.)");
}

}  // namespace adaptive
