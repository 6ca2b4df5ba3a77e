#include "bindings/arrival.h"

#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "bindings/dlpack.h"
#include "bindings/torch_tensor.h"
#include "common/error.h"
#include "common/message.h"

namespace py = pybind11;

namespace adaptive {
namespace {

// The name of a capsule that was not taken yet.
constexpr const char* kCapsuleName = "dltensor";

struct Managed {
  DlManagedTensor head{};  // first: consumers hold its address
  Lease lease;
  std::int64_t shape[kMaxDimensions];
  std::int64_t strides[kMaxDimensions];
};

void delete_managed(DlManagedTensor* head) {
  delete static_cast<Managed*>(head->context);
}

// A consumer renames the capsule and calls the deleter itself.
void delete_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kCapsuleName) == 0) {
    return;
  }
  auto* const head = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, kCapsuleName));
  head->deleter(head);
}

std::unique_ptr<Managed> manage(Lease&& lease, const Message& message, Place place) {
  auto managed = std::make_unique<Managed>();
  fill_dlpack(managed->head.tensor, managed->shape, managed->strides, lease.data(), message);
  managed->head.tensor.device = {place.type, place.id};
  managed->head.context = managed.get();
  managed->head.deleter = &delete_managed;
  managed->lease = std::move(lease);
  return managed;
}

// ---- Arrival

// What a subclass keeps with an arrival: attributes of its own would make each one known to the
// garbage collector, which costs as much as all else.
enum Kept : std::size_t { kLabel, kSettled, kNumKept };

struct PyArrival {
  PyObject_HEAD bool taken;
  long free_slots;  // when it was taken
  long least_free;  // as in ArrivalForm, and the next
  bool direct;
  PyObject* kept[kNumKept];
  Arrival arrival;
};

constexpr long kManySlots = 64;

const Message& message_of(PyObject* self) noexcept {
  return reinterpret_cast<PyArrival*>(self)->arrival.message;
}

PyObject* arrival_peer(PyObject* self, void*) {
  return PyLong_FromLong(reinterpret_cast<PyArrival*>(self)->arrival.peer);
}
PyObject* arrival_step(PyObject* self, void*) {
  return PyLong_FromLongLong(message_of(self).step);
}
PyObject* arrival_kind(PyObject* self, void*) {
  return PyLong_FromLong(static_cast<long>(message_of(self).kind));
}
PyObject* arrival_chunk(PyObject* self, void*) {
  return PyLong_FromLong(message_of(self).chunk);
}
PyObject* arrival_microbatch(PyObject* self, void*) {
  return PyLong_FromLong(message_of(self).microbatch);
}
PyObject* arrival_dtype(PyObject* self, void*) {
  return PyLong_FromLong(static_cast<long>(message_of(self).dtype));
}
PyObject* arrival_variant(PyObject* self, void*) {
  return PyLong_FromLong(message_of(self).variant);
}
PyObject* arrival_nbytes(PyObject* self, void*) {
  return PyLong_FromUnsignedLongLong(message_of(self).nbytes);
}
PyObject* arrival_arrived_ns(PyObject* self, void*) {
  const std::int64_t arrived_ns = reinterpret_cast<PyArrival*>(self)->arrival.arrived_ns;
  if (arrived_ns == 0) {
    Py_RETURN_NONE;
  }
  return PyLong_FromLongLong(arrived_ns);
}
PyObject* arrival_sequence(PyObject* self, void*) {
  return PyLong_FromUnsignedLongLong(message_of(self).sequence);
}

// At most as many as are free: what is on its way is not known here.
long free_slots(const Arrival& arrival) noexcept {
  if (arrival.held == nullptr) {
    return kManySlots;
  }
  const long held = arrival.held->load(std::memory_order_relaxed);
  return std::max(0L, static_cast<long>(arrival.slots) - held);
}

PyObject* arrival_free_slots(PyObject* self, void*) {
  auto* const object = reinterpret_cast<PyArrival*>(self);
  return PyLong_FromLong(object->taken ? object->free_slots : free_slots(object->arrival));
}

PyObject* arrival_least_free(PyObject* self, void*) {
  return PyLong_FromLong(reinterpret_cast<PyArrival*>(self)->least_free);
}

PyObject* arrival_shape(PyObject* self, void*) {
  const Message& message = message_of(self);
  PyObject* const shape = PyTuple_New(message.dimensions);
  if (shape == nullptr) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < message.dimensions; ++i) {
    PyObject* const size = PyLong_FromLongLong(message.shape[i]);
    if (size == nullptr) {
      Py_DECREF(shape);
      return nullptr;
    }
    PyTuple_SET_ITEM(shape, i, size);
  }
  return shape;
}

PyObject* arrival_on_device(PyObject* self, void*) {
  return PyBool_FromLong(reinterpret_cast<PyArrival*>(self)->arrival.device != nullptr);
}

// Whether the payload can be taken; sets Python's error where not.
bool may_take(const PyArrival* object, bool on_device) {
  if (object->taken) {
    PyErr_SetString(PyExc_RuntimeError, "the payload of an arrival can be taken once");
    return false;
  }
  if (on_device != (object->arrival.device != nullptr)) {
    PyErr_SetString(PyExc_RuntimeError, on_device
                                            ? "the payload is in the host's memory: use dlpack()"
                                            : "the payload is on a device: use dlpack_on()");
    return false;
  }
  return true;
}

PyObject* arrival_dlpack(PyObject* self, PyObject*) {
  auto* const object = reinterpret_cast<PyArrival*>(self);
  if (!may_take(object, false)) {
    return nullptr;
  }
  try {
    object->taken = true;
    object->free_slots = free_slots(object->arrival);
    return make_dlpack(std::move(object->arrival.payload), object->arrival.message).release().ptr();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

PyObject* arrival_dlpack_on(PyObject* self, PyObject* args) {
  auto* const object = reinterpret_cast<PyArrival*>(self);
  unsigned long long stream = 0;
  Place place;
  if (PyArg_ParseTuple(args, "Kii", &stream, &place.type, &place.id) == 0 ||
      !may_take(object, true)) {
    return nullptr;
  }
  try {
    Arrival& arrival = object->arrival;
    arrival.device->enter(arrival.slot, reinterpret_cast<void*>(stream));
    object->taken = true;
    object->free_slots = free_slots(arrival);
    return make_dlpack(std::move(arrival.payload), arrival.message, place).release().ptr();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

PyObject* arrival_tensor(PyObject* self, PyObject*) {
  auto* const object = reinterpret_cast<PyArrival*>(self);
  if (!may_take(object, false)) {
    return nullptr;
  }
  try {
    object->taken = true;
    object->free_slots = free_slots(object->arrival);
    return make_tensor(std::move(object->arrival.payload), object->arrival.message).release().ptr();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

PyObject* arrival_take(PyObject* self, PyObject*) {
  static PyObject* const ask = PyUnicode_InternFromString("_take");
  static PyObject* const clone = PyUnicode_InternFromString("clone");
  auto* const object = reinterpret_cast<PyArrival*>(self);
  if (PyObject* const settled = object->kept[kSettled]; settled != nullptr) {
    Py_INCREF(settled);
    return settled;
  }
  if (!object->direct || object->arrival.device != nullptr || message_of(self).variant != 0) {
    return PyObject_CallMethodNoArgs(self, ask);
  }
  PyObject* const tensor = arrival_tensor(self, nullptr);
  if (tensor == nullptr || object->free_slots >= object->least_free) {
    return tensor;
  }
  PyObject* const copy = PyObject_CallMethodNoArgs(tensor, clone);
  Py_DECREF(tensor);
  return copy;
}

PyObject* arrival_kept(PyObject* self, void* which) {
  PyObject* const value =
      reinterpret_cast<PyArrival*>(self)->kept[reinterpret_cast<std::uintptr_t>(which)];
  PyObject* const shown = value == nullptr ? Py_None : value;
  Py_INCREF(shown);
  return shown;
}

int arrival_keep(PyObject* self, PyObject* value, void* which) {
  auto*& place = reinterpret_cast<PyArrival*>(self)->kept[reinterpret_cast<std::uintptr_t>(which)];
  Py_XINCREF(value);
  PyObject* const former = place;
  place = value;
  Py_XDECREF(former);
  return 0;
}

void delete_arrival(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  auto* const object = reinterpret_cast<PyArrival*>(self);
  for (PyObject*& value : object->kept) {
    Py_CLEAR(value);
  }
  object->arrival.~Arrival();
  type->tp_free(self);
  Py_DECREF(type);
}

PyGetSetDef kArrivalFields[] = {
    {"peer", arrival_peer, nullptr, "Global rank of the sender.", nullptr},
    {"step", arrival_step, nullptr, nullptr, nullptr},
    {"kind", arrival_kind, nullptr, "0: forward, 1: backward, 2: data.", nullptr},
    {"chunk", arrival_chunk, nullptr, nullptr, nullptr},
    {"microbatch", arrival_microbatch, nullptr, nullptr, nullptr},
    {"dtype", arrival_dtype, nullptr, "Code of the element type.", nullptr},
    {"variant", arrival_variant, nullptr, "Which 8-bit float.", nullptr},
    {"shape", arrival_shape, nullptr, nullptr, nullptr},
    {"nbytes", arrival_nbytes, nullptr, nullptr, nullptr},
    {"arrived_ns", arrival_arrived_ns, nullptr,
     "When it arrived, as time.monotonic_ns(), or None where no thread saw that.", nullptr},
    {"sequence", arrival_sequence, nullptr, "Number of the message on its channel.", nullptr},
    {"on_device", arrival_on_device, nullptr, "Whether the payload is in a GPU's memory.", nullptr},
    {"free_slots", arrival_free_slots, nullptr,
     "Slots of the channel that this process does not hold, now or when dlpack() was called.",
     nullptr},
    {"least_free", arrival_least_free, nullptr, "As deliver_as() was told.", nullptr},
    {"_label", arrival_kept, arrival_keep, "For a subclass; None at first.",
     reinterpret_cast<void*>(kLabel)},
    {"_settled", arrival_kept, arrival_keep, "What take() returns instead of the payload.",
     reinterpret_cast<void*>(kSettled)},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef kArrivalMethods[] = {
    {"dlpack", arrival_dlpack, METH_NOARGS,
     "Returns the payload as a DLPack capsule, once. Its memory goes back to the channel when the "
     "tensor made of it is gone, or this object, if it is not called."},
    {"dlpack_on", arrival_dlpack_on, METH_VARARGS,
     "dlpack_on(stream, device_type, device_id)\n\nAs dlpack(), for a payload on a device, which "
     "`stream`, a CUstream as a number, may read from now on. The memory goes back when that "
     "stream is past what is on it when the tensor is dropped. Waits for nothing."},
    {"tensor", arrival_tensor, METH_NOARGS,
     "Returns the payload as a tensor, once, faster than through dlpack(). After use_torch()."},
    {"take", arrival_take, METH_NOARGS,
     "As tensor(), but a copy where fewer slots than least_free are free; what _take() of a "
     "subclass returns, where the node is not direct, the payload is on a device or a variant."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kArrivalSlots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(&delete_arrival)},
    {Py_tp_getset, kArrivalFields},
    {Py_tp_methods, kArrivalMethods},
    {Py_tp_doc, const_cast<char*>("A whole message of a peer.")},
    {0, nullptr},
};

PyType_Spec kArrivalSpec = {"megatron.adaptive._C.Arrival", sizeof(PyArrival), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE |
                                Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
                            kArrivalSlots};

PyTypeObject* arrival_type = nullptr;  // of this module, which is never unloaded

}  // namespace

void bind_arrival(py::module_& module) {
  PyObject* const type = PyType_FromSpec(&kArrivalSpec);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  arrival_type = reinterpret_cast<PyTypeObject*>(type);
  module.add_object("Arrival", py::reinterpret_borrow<py::object>(type));
}

ArrivalForm plain_arrivals() {
  return {py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(arrival_type))};
}

void check_arrival_type(const py::object& type) {
  if (PyType_Check(type.ptr()) == 0 ||
      PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type.ptr()), arrival_type) == 0) {
    throw py::type_error("the type of arrivals must be a subclass of Arrival");
  }
}

py::object make_arrival(Arrival&& arrival, const ArrivalForm& form) {
  auto* const type = reinterpret_cast<PyTypeObject*>(form.type.ptr());
  auto* const object = reinterpret_cast<PyArrival*>(type->tp_alloc(type, 0));  // zeroed
  if (object == nullptr) {
    throw py::error_already_set();
  }
  object->least_free = form.least_free;
  object->direct = form.direct;
  new (&object->arrival) Arrival(std::move(arrival));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
}

py::object make_dlpack(Lease&& lease, const Message& message, Place place) {
  std::unique_ptr<Managed> managed = manage(std::move(lease), message, place);
  PyObject* const capsule = PyCapsule_New(&managed->head, kCapsuleName, &delete_capsule);
  if (capsule == nullptr) {
    throw py::error_already_set();
  }
  managed.release();
  return py::reinterpret_steal<py::object>(capsule);
}

}  // namespace adaptive
