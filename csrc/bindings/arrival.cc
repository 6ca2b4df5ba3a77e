#include "bindings/arrival.h"

#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

#include "bindings/tensors.h"
#include "common/message.h"

namespace py = pybind11;

namespace adaptive {
namespace {

// Values that a subclass stores with an arrival. If the subclass had attributes of its own, the
// garbage collector would track every arrival, which doubles the cost.
enum Kept : std::size_t { kLabel, kSettled, kNumKept };

struct PyArrival {
  PyObject_HEAD bool taken;
  long free_slots;  // number of free slots when the payload was taken
  long least_free;  // see ArrivalForm
  PyObject* kept[kNumKept];
  Arrival arrival;
};

constexpr long kManySlots = 64;

PyArrival* own(PyObject* self) noexcept {
  return reinterpret_cast<PyArrival*>(self);
}
const Message& message_of(PyObject* self) noexcept {
  return own(self)->arrival.message;
}

// Getter for attributes that are integer fields of the message.
template <auto Message::* field>
PyObject* arrival_number(PyObject* self, void*) {
  return PyLong_FromLongLong(static_cast<long long>(message_of(self).*field));
}

PyObject* arrival_peer(PyObject* self, void*) {
  return PyLong_FromLong(own(self)->arrival.peer);
}
PyObject* arrival_arrived_ns(PyObject* self, void*) {
  const std::int64_t arrived_ns = own(self)->arrival.arrived_ns;
  if (arrived_ns == 0) {
    Py_RETURN_NONE;
  }
  return PyLong_FromLongLong(arrived_ns);
}

// Returns an upper limit of the number of free slots. Messages that are still in transit are not
// counted, because they are not known here.
long free_slots(const Arrival& arrival) noexcept {
  if (arrival.held == nullptr) {
    return kManySlots;
  }
  const long held = arrival.held->load(std::memory_order_relaxed);
  return std::max(0L, static_cast<long>(arrival.slots) - held);
}

PyObject* arrival_free_slots(PyObject* self, void*) {
  auto* const object = own(self);
  return PyLong_FromLong(object->taken ? object->free_slots : free_slots(object->arrival));
}

PyObject* arrival_least_free(PyObject* self, void*) {
  return PyLong_FromLong(own(self)->least_free);
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
  return PyBool_FromLong(own(self)->arrival.device != nullptr);
}

// Returns the payload as a tensor. On failure returns null and sets Python's error.
PyObject* take_tensor(PyArrival* object, bool on_device, Place place = {}) {
  if (object->taken) {
    PyErr_SetString(PyExc_RuntimeError, "the payload of an arrival can only be taken once");
    return nullptr;
  }
  if (on_device != (object->arrival.device != nullptr)) {
    PyErr_SetString(PyExc_RuntimeError, on_device ? "the payload is in host memory: use tensor()"
                                                  : "the payload is on a device: use tensor_on()");
    return nullptr;
  }
  try {
    object->taken = true;
    object->free_slots = free_slots(object->arrival);
    return make_tensor(std::move(object->arrival.payload), object->arrival.message, place)
        .release()
        .ptr();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

PyObject* arrival_tensor(PyObject* self, PyObject*) {
  return take_tensor(own(self), false);
}

PyObject* arrival_tensor_on(PyObject* self, PyObject* args) {
  Arrival& arrival = own(self)->arrival;
  unsigned long long stream = 0;
  Place place;
  if (PyArg_ParseTuple(args, "Kii", &stream, &place.type, &place.id) == 0) {
    return nullptr;
  }
  try {
    if (arrival.device != nullptr && !own(self)->taken) {
      arrival.device->enter(arrival.slot, reinterpret_cast<void*>(stream));
    }
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
  return take_tensor(own(self), true, place);
}

PyObject* arrival_take(PyObject* self, PyObject*) {
  static PyObject* const ask = PyUnicode_InternFromString("_take");
  static PyObject* const clone = PyUnicode_InternFromString("clone");
  auto* const object = own(self);
  if (PyObject* const settled = object->kept[kSettled]; settled != nullptr) {
    Py_INCREF(settled);
    return settled;
  }
  if (object->arrival.device != nullptr || message_of(self).variant != 0) {
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
  PyObject* const value = own(self)->kept[reinterpret_cast<std::uintptr_t>(which)];
  PyObject* const shown = value == nullptr ? Py_None : value;
  Py_INCREF(shown);
  return shown;
}

int arrival_keep(PyObject* self, PyObject* value, void* which) {
  auto*& place = own(self)->kept[reinterpret_cast<std::uintptr_t>(which)];
  Py_XINCREF(value);
  PyObject* const former = place;
  place = value;
  Py_XDECREF(former);
  return 0;
}

void delete_arrival(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  auto* const object = own(self);
  for (PyObject*& value : object->kept) {
    Py_CLEAR(value);
  }
  object->arrival.~Arrival();
  type->tp_free(self);
  Py_DECREF(type);
}

PyGetSetDef kArrivalFields[] = {
    {"peer", arrival_peer, nullptr, "Global rank of the sender.", nullptr},
    {"step", arrival_number<&Message::step>, nullptr, nullptr, nullptr},
    {"kind", arrival_number<&Message::kind>, nullptr, "0: forward, 1: backward, 2: data.", nullptr},
    {"chunk", arrival_number<&Message::chunk>, nullptr, nullptr, nullptr},
    {"microbatch", arrival_number<&Message::microbatch>, nullptr, nullptr, nullptr},
    {"dtype", arrival_number<&Message::dtype>, nullptr, "Code of the element type.", nullptr},
    {"variant", arrival_number<&Message::variant>, nullptr, "Which 8-bit float type.", nullptr},
    {"shape", arrival_shape, nullptr, nullptr, nullptr},
    {"nbytes", arrival_number<&Message::nbytes>, nullptr, nullptr, nullptr},
    {"arrived_ns", arrival_arrived_ns, nullptr,
     "Arrival time as time.monotonic_ns(), or None if no thread observed it.", nullptr},
    {"sequence", arrival_number<&Message::sequence>, nullptr,
     "Number of the message on its channel.", nullptr},
    {"on_device", arrival_on_device, nullptr, "Whether the payload is in a GPU's memory.", nullptr},
    {"free_slots", arrival_free_slots, nullptr,
     "Number of slots that this process did not hold, now or when the payload was taken.", nullptr},
    {"least_free", arrival_least_free, nullptr, "The argument of deliver_as().", nullptr},
    {"_label", arrival_kept, arrival_keep, "For subclasses; initially None.",
     reinterpret_cast<void*>(kLabel)},
    {"_settled", arrival_kept, arrival_keep, "What take() returns instead of the payload.",
     reinterpret_cast<void*>(kSettled)},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef kArrivalMethods[] = {
    {"tensor", arrival_tensor, METH_NOARGS,
     "Returns the payload as a tensor. May be called once, after use_torch(). The memory returns "
     "to the channel when the last view is destroyed, or with this object if it is not called."},
    {"tensor_on", arrival_tensor_on, METH_VARARGS,
     "tensor_on(stream, device_type, device_id)\n\nLike tensor(), for a payload on a device, which "
     "has "
     "DLPack's type and id. `stream`, a CUstream as a number, may read it from now on. When the "
     "tensor is destroyed, the memory is returned after the work on the stream. Does not wait."},
    {"take", arrival_take, METH_NOARGS,
     "Like tensor(), but returns a copy if fewer slots than least_free are free. Returns the "
     "result of the subclass's _take() if the payload is on a device or has a variant."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot kArrivalSlots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(&delete_arrival)},
    {Py_tp_getset, kArrivalFields},
    {Py_tp_methods, kArrivalMethods},
    {Py_tp_doc, const_cast<char*>("A complete message from a peer.")},
    {0, nullptr},
};

PyType_Spec kArrivalSpec = {"megatron.adaptive._C.Arrival", sizeof(PyArrival), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE |
                                Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
                            kArrivalSlots};

PyTypeObject* arrival_type = nullptr;  // belongs to this module, which is never unloaded

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
  auto* const object = reinterpret_cast<PyArrival*>(type->tp_alloc(type, 0));  // filled with zeros
  if (object == nullptr) {
    throw py::error_already_set();
  }
  object->least_free = form.least_free;
  new (&object->arrival) Arrival(std::move(arrival));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
}

}  // namespace adaptive
