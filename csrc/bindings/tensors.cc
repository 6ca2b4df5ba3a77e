#include "bindings/tensors.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>

#include "common/error.h"

namespace py = pybind11;

namespace adaptive {
namespace {

// ---- The layout of DLPack, https://dmlc.github.io/dlpack, with which array libraries share memory

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
// The unversioned struct, which every consumer accepts.
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
// The C functions that a library exports. Only the functions that are called here are declared with
// their full type.
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

// ---- Tensors

constexpr std::uint32_t kMajor = 1;
constexpr std::uint32_t kMinor = 3;
constexpr const char* kTableName = "dlpack_exchange_api";
constexpr const char* kCapsuleName = "dltensor";  // name of an unconsumed capsule

// The table of torch, which is never unloaded. Written while the GIL is held.
const DlExchange* exchange = nullptr;
PyObject* from_capsule = nullptr;

struct ElementCode {
  std::uint8_t code;
  std::uint8_t bits;
  ElementType dtype;
  std::uint8_t variant;
};

// The variants are those of megatron/adaptive/transport/interface.py. Complex types are omitted,
// because their elements may be conjugated lazily.
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

// The memory of a tensor, with a description for its consumer. `Head` is DlManagedTensor or
// DlManagedVersioned.
template <typename Head>
struct Managed {
  Head head{};  // must be first: consumers hold its address
  Lease lease;
  std::int64_t shape[kMaxDimensions];
  std::int64_t strides[kMaxDimensions];

  static void destroy(Head* head) { delete static_cast<Managed*>(head->context); }
};

// Creates a contiguous tensor that uses the memory of `lease`.
template <typename Head>
std::unique_ptr<Managed<Head>> manage(Lease&& lease, const Message& message, Place place) {
  auto managed = std::make_unique<Managed<Head>>();
  managed->head.context = managed.get();
  managed->head.deleter = &Managed<Head>::destroy;
  std::int64_t stride = 1;
  for (int i = message.dimensions - 1; i >= 0; --i) {
    managed->shape[i] = message.shape[i];
    managed->strides[i] = stride;
    // The product can overflow only for a tensor without elements, whose strides do not matter.
    if (message.shape[i] != 0 && __builtin_mul_overflow(stride, message.shape[i], &stride)) {
      stride = 1;
    }
  }
  DlTensor& tensor = managed->head.tensor;
  tensor.data = lease.data();
  tensor.device = {place.type, place.id};
  tensor.dimensions = message.dimensions;
  tensor.dtype = {dlpack_code(message.dtype),
                  static_cast<std::uint8_t>(8 * element_bytes(message.dtype)), 1};
  tensor.shape = managed->shape;
  tensor.strides = managed->strides;
  managed->lease = std::move(lease);
  return managed;
}

// Calls the deleter if no consumer has taken over the tensor. A consumer renames the capsule, and
// calls the deleter itself.
void delete_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kCapsuleName) != 0) {
    auto* const head = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, kCapsuleName));
    head->deleter(head);
  }
}

py::object make_through_capsule(Lease&& lease, const Message& message, Place place) {
  auto managed = manage<DlManagedTensor>(std::move(lease), message, place);
  const auto capsule = py::reinterpret_steal<py::object>(
      PyCapsule_New(&managed->head, kCapsuleName, &delete_capsule));
  if (!capsule) {
    throw py::error_already_set();
  }
  managed.release();
  PyObject* const tensor = PyObject_CallOneArg(from_capsule, capsule.ptr());
  if (tensor == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(tensor);
}

bool use_torch(const py::object& table_capsule, const py::object& from_dlpack) {
  const DlExchange* table = nullptr;
  if (!table_capsule.is_none()) {
    table = static_cast<const DlExchange*>(PyCapsule_GetPointer(table_capsule.ptr(), kTableName));
    if (table == nullptr) {
      throw py::error_already_set();
    }
  }
  const bool known = table != nullptr && table->version.major == kMajor &&
                     table->managed_to_object != nullptr && table->tensor_from_object != nullptr;
  exchange = known ? table : nullptr;
  Py_XDECREF(from_capsule);
  from_capsule = from_dlpack.inc_ref().ptr();
  return known;
}

}  // namespace

bool read_tensor(PyObject* tensor, Message& message, const void** data) {
  if (exchange == nullptr) {
    return false;
  }
  DlTensor found;
  if (exchange->tensor_from_object(tensor, &found) != 0) {
    PyErr_Clear();  // DLPack does not know the type; the caller's fallback raises a better error
    return false;
  }
  const ElementCode* const element = find_element(found.dtype);
  if (element == nullptr || found.device.type != kDlCpu || found.dimensions < 0 ||
      found.dimensions > kMaxDimensions) {
    return false;
  }
  std::int64_t count = 1;
  for (int i = found.dimensions - 1; i >= 0; --i) {
    const std::int64_t size = found.shape[i];
    if (size != 1 && found.strides != nullptr && found.strides[i] != count) {
      return false;
    }
    message.shape[i] = size;
    if (size < 0 || __builtin_mul_overflow(count, size, &count)) {
      return false;
    }
  }
  if (count < 2) {
    return false;  // even a single element may be part of a lazily conjugated complex number
  }
  message.dimensions = static_cast<std::uint8_t>(found.dimensions);
  message.dtype = element->dtype;
  message.variant = element->variant;
  if (__builtin_mul_overflow(static_cast<std::uint64_t>(count), element_bytes(element->dtype),
                             &message.nbytes)) {
    return false;
  }
  *data = static_cast<const std::byte*>(found.data) + found.byte_offset;
  return true;
}

py::object make_tensor(Lease&& lease, const Message& message, Place place) {
  if (from_capsule == nullptr) {
    throw std::runtime_error("tensors can only be created after use_torch()");
  }
  if (exchange == nullptr) {
    return make_through_capsule(std::move(lease), message, place);
  }
  auto managed = manage<DlManagedVersioned>(std::move(lease), message, place);
  managed->head.version = {kMajor, kMinor};
  void* made = nullptr;
  if (exchange->managed_to_object(&managed.release()->head, &made) != 0) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(made));
}

void bind_tensors(py::module_& module) {
  module.def("use_torch", &use_torch, py::arg("exchange_api"), py::arg("from_dlpack"),
             R"(Makes the extension create torch tensors from now on.

exchange_api: torch.Tensor.__dlpack_c_exchange_api__, or None. from_dlpack: a function that creates
a tensor from a DLPack capsule, for torch without the table. Returns whether the table's version is
supported.)");
}

}  // namespace adaptive
