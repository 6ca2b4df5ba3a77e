// The Python class Node: the channels of one process in one job, over the core's senders.
//
// What runs per message takes its arguments as an array (METH_FASTCALL); the rest is pybind11's.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrival.h"
#include "bindings/node.h"
#include "bindings/python.h"
#include "bindings/torch_tensor.h"

namespace py = pybind11;

namespace adaptive {
namespace {

Node& node_of(PyObject* self) {
  // The method descriptor has checked the type; pybind11's own way to the pointer takes longer than
  // all the rest of a call.
  auto* const instance = reinterpret_cast<py::detail::instance*>(self);
  auto* const node = static_cast<Node*>(instance->simple_value_holder[0]);
  if (node == nullptr) {
    throw std::runtime_error("Node.__init__() was not called");
  }
  return *node;
}

std::int64_t as_int(PyObject* value) {
  const long long result = PyLong_AsLongLong(value);
  if (result == -1 && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return result;
}

template <typename Narrow>
Narrow narrow(PyObject* value, const char* name) {
  const std::int64_t wide = as_int(value);
  if (wide < std::numeric_limits<Narrow>::min() || wide > std::numeric_limits<Narrow>::max()) {
    throw std::invalid_argument(std::string(name) + " " + std::to_string(wide) +
                                " is out of range");
  }
  return static_cast<Narrow>(wide);
}

void check_count(Py_ssize_t given, Py_ssize_t wanted, const char* usage) {
  if (given != wanted) {
    throw py::type_error(usage);
  }
}

void fill_shape(Message& message, PyObject* shape) {
  if (!PyTuple_Check(shape)) {
    throw py::type_error("shape must be a tuple");
  }
  const Py_ssize_t dimensions = PyTuple_GET_SIZE(shape);
  if (dimensions > kMaxDimensions) {
    throw std::invalid_argument("a tensor of " + std::to_string(dimensions) +
                                " dimensions cannot be sent; at most " +
                                std::to_string(kMaxDimensions) + " can be");
  }
  message.dimensions = static_cast<std::uint8_t>(dimensions);
  for (Py_ssize_t i = 0; i < dimensions; ++i) {
    message.shape[i] = as_int(PyTuple_GET_ITEM(shape, i));
  }
}

std::uint64_t shape_bytes(const Message& message) {
  std::uint64_t bytes = element_bytes(message.dtype);
  for (int i = 0; i < message.dimensions; ++i) {
    const auto size = static_cast<std::uint64_t>(message.shape[i]);
    if (message.shape[i] < 0 || __builtin_mul_overflow(bytes, size, &bytes)) {
      throw std::invalid_argument("the shape has a negative size or more bytes than 2^64");
    }
  }
  return bytes;
}

ElementType element_of(PyObject* code) {
  const auto dtype = static_cast<ElementType>(narrow<std::uint8_t>(code, "dtype_code"));
  if (element_bytes(dtype) == 0) {
    throw std::invalid_argument("dtype_code is not in the table");
  }
  return dtype;
}

// step, kind, chunk, microbatch
void fill_label(Message& message, PyObject* const* args) {
  message.step = as_int(args[0]);
  message.kind = static_cast<MessageKind>(narrow<std::uint8_t>(args[1], "kind"));
  if (message.kind == MessageKind::kEnd) {
    throw std::invalid_argument("kind 255 is the transports' own: close() sends it");
  }
  message.chunk = narrow<std::int32_t>(args[2], "chunk");
  message.microbatch = narrow<std::int32_t>(args[3], "microbatch");
}

// step, kind, chunk, microbatch, dtype_code, variant, shape
Message message_from(PyObject* const* args) {
  Message message;
  fill_label(message, args);
  message.dtype = element_of(args[4]);
  message.variant = narrow<std::uint8_t>(args[5], "variant");
  fill_shape(message, args[6]);
  message.nbytes = shape_bytes(message);
  return message;
}

void* address_of(PyObject* value) {
  void* const address = PyLong_AsVoidPtr(value);
  if (address == nullptr && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return address;
}

void check_size(const Message& message, const void* data, std::int64_t nbytes) {
  if (nbytes < 0 || static_cast<std::uint64_t>(nbytes) != message.nbytes ||
      (data == nullptr && nbytes != 0)) {
    throw std::invalid_argument("nbytes " + std::to_string(nbytes) +
                                " are not those of the shape, " + std::to_string(message.nbytes) +
                                ", or have no address");
  }
}

template <typename Body>
PyObject* guarded(const Body& body) noexcept {
  try {
    return body();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

PyObject* none() noexcept {
  Py_RETURN_NONE;
}

PyObject* node_send(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    check_count(count, 11,
                "send(peer, step, kind, chunk, microbatch, dtype_code, variant, shape, data_ptr, "
                "nbytes, keep)");
    const Message message = message_from(args + 1);
    void* const data = address_of(args[8]);
    check_size(message, data, as_int(args[9]));
    node_of(self).send(narrow<std::int32_t>(args[0], "peer"), message, data, args[10]);
    return none();
  });
}

PyObject* node_send_after(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    check_count(count, 13,
                "send_after(peer, step, kind, chunk, microbatch, dtype_code, variant, shape, "
                "data_ptr, nbytes, on_device, stream, keep)");
    const Message message = message_from(args + 1);
    void* const data = address_of(args[8]);
    check_size(message, data, as_int(args[9]));
    void* const stream = address_of(args[11]);
    node_of(self).send_after(narrow<std::int32_t>(args[0], "peer"), message, data,
                             PyObject_IsTrue(args[10]) == 1, stream, args[12]);
    return none();
  });
}

PyObject* node_send_tensor(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    check_count(count, 6, "send_tensor(peer, step, kind, chunk, microbatch, tensor)");
    Message message;
    const void* data = nullptr;
    if (!read_tensor(args[5], message, &data)) {
      Py_RETURN_FALSE;
    }
    fill_label(message, args + 1);
    Node& node = node_of(self);
    const auto peer = narrow<std::int32_t>(args[0], "peer");
    if (const Node::Place* const place = node.reserved_at(data); place == nullptr) {
      node.send_tensor(peer, message, data, args[5]);
    } else if (place->peer == peer) {
      Reserved reserved;
      reserved.token = place->token;
      node.commit(peer, message, std::move(reserved));
    } else {
      Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
  });
}

PyObject* node_reserve(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    check_count(count, 4, "reserve(peer, nbytes, dtype_code, shape)");
    Message message;
    message.dtype = element_of(args[2]);
    fill_shape(message, args[3]);
    message.nbytes = shape_bytes(message);
    if (as_int(args[1]) < 0 || static_cast<std::uint64_t>(as_int(args[1])) != message.nbytes) {
      throw std::invalid_argument("nbytes are not those of the shape, " +
                                  std::to_string(message.nbytes));
    }
    auto reserved = node_of(self).reserve(narrow<std::int32_t>(args[0], "peer"), message.nbytes);
    if (!reserved) {
      return none();
    }
    const std::uint64_t token = reserved->token;
    const py::object capsule = make_dlpack(std::move(reserved->memory), message);
    return py::make_tuple(capsule, token).release().ptr();
  });
}

PyObject* node_commit(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    check_count(count, 9,
                "commit(peer, token, step, kind, chunk, microbatch, dtype_code, variant, shape)");
    Reserved reserved;
    reserved.token = static_cast<std::uint64_t>(as_int(args[1]));
    node_of(self).commit(narrow<std::int32_t>(args[0], "peer"), message_from(args + 2),
                         std::move(reserved));
    return none();
  });
}

PyObject* node_reserve_tensor(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    check_count(count, 3, "reserve_tensor(peer, dtype_code, shape)");
    Message message;
    message.dtype = element_of(args[1]);
    fill_shape(message, args[2]);
    message.nbytes = shape_bytes(message);
    if (message.nbytes == 0) {
      return none();
    }
    auto reserved = node_of(self).reserve(narrow<std::int32_t>(args[0], "peer"), message.nbytes);
    if (!reserved) {
      return none();
    }
    return make_tensor(std::move(reserved->memory), message).release().ptr();
  });
}

PyObject* node_reserved_at(PyObject* self, PyObject* address) {
  return guarded([&]() -> PyObject* {
    const Node::Place* const place = node_of(self).reserved_at(address_of(address));
    if (place == nullptr) {
      return none();
    }
    return py::make_tuple(place->peer, place->token).release().ptr();
  });
}

PyObject* node_poll(PyObject* self, PyObject*) {
  return guarded([&] { return node_of(self).poll().release().ptr(); });
}

double as_seconds(PyObject* value) {
  const double seconds = PyFloat_AsDouble(value);
  if (seconds == -1.0 && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return seconds;
}

PyObject* node_wait(PyObject* self, PyObject* timeout) {
  return guarded(
      [&] { return node_of(self).wait(deadline_after(as_seconds(timeout))).release().ptr(); });
}

PyObject* node_wait_until(PyObject* self, PyObject* deadline) {
  return guarded(
      [&] { return node_of(self).wait(deadline_at(as_seconds(deadline))).release().ptr(); });
}

PyObject* node_put(PyObject* self, PyObject* item) {
  return guarded([&] {
    node_of(self).put(item);
    return none();
  });
}

template <typename Function>
PyCFunction as_method(Function* function) noexcept {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef kFastMethods[] = {
    {"send", as_method(&node_send), METH_FASTCALL,
     "send(peer, step, kind, chunk, microbatch, dtype_code, variant, shape, data_ptr, nbytes, "
     "keep)\n\nStarts sending the contiguous tensor at data_ptr and never waits for the peer. "
     "`keep` is held until its memory is no longer needed; which must not be written to before.\n\n"
     "Raises PeerLostError, TransportError."},
    {"send_after", as_method(&node_send_after), METH_FASTCALL,
     "send_after(peer, step, kind, chunk, microbatch, dtype_code, variant, shape, data_ptr, "
     "nbytes, "
     "on_device, stream, keep)\n\nAs send(), for a tensor that is there when `stream`, a CUstream "
     "as a number, has come so far: at data_ptr of this process's GPU, at most a slot of it, or of "
     "the host. Where info() says that gpu_path is cuda-ipc; all messages then go this way."},
    {"send_tensor", as_method(&node_send_tensor), METH_FASTCALL,
     "send_tensor(peer, step, kind, chunk, microbatch, tensor)\n\nAs send(), for a contiguous "
     "tensor of the CPU; as commit(), where it begins where reserved memory of the channel does. "
     "False, and nothing is sent, for any other, and for memory of another channel. After "
     "use_torch()."},
    {"reserve", as_method(&node_reserve), METH_FASTCALL,
     "reserve(peer, nbytes, dtype_code, shape)\n\nReturns (DLPack capsule, token) of memory of the "
     "channel, or None where there is none. Dropping the tensor before commit() gives it back."},
    {"commit", as_method(&node_commit), METH_FASTCALL,
     "commit(peer, token, step, kind, chunk, microbatch, dtype_code, variant, shape)\n\nSends what "
     "is in reserved memory without a copy. It may be read afterwards, but not written to."},
    {"reserve_tensor", as_method(&node_reserve_tensor), METH_FASTCALL,
     "reserve_tensor(peer, dtype_code, shape)\n\nAs reserve(), but returns a tensor, which "
     "send_tensor() commits; None also for no bytes. After use_torch()."},
    {"reserved_at", as_method(&node_reserved_at), METH_O,
     "reserved_at(address)\n\nReturns (peer, token) of reserved memory that begins there and was "
     "not committed, or None."},
    {"poll", as_method(&node_poll), METH_NOARGS,
     "poll()\n\nReturns the oldest arrival or put item, None if there is none now.\n\nRaises "
     "PeerLostError or TransportError, once, for a channel that ended."},
    {"wait", as_method(&node_wait), METH_O,
     "wait(timeout_s)\n\nAs poll(), but waits, without the GIL; None when the time is over."},
    {"wait_until", as_method(&node_wait_until), METH_O,
     "wait_until(deadline_s)\n\nAs wait(), until a time of time.monotonic(), -inf to inf. Does not "
     "ask for the time where something is there at once or soon."},
    {"put", as_method(&node_put), METH_O,
     "put(item)\n\nAdds any object to what poll() and wait() return. Any thread."},
    {nullptr, nullptr, 0, nullptr},
};

void add_fast_methods(py::object type) {
  for (PyMethodDef* method = kFastMethods; method->ml_name != nullptr; ++method) {
    PyObject* const descriptor =
        PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), method);
    if (descriptor == nullptr) {
      throw py::error_already_set();
    }
    type.attr(method->ml_name) = py::reinterpret_steal<py::object>(descriptor);
  }
}

std::unique_ptr<Node> make_node(int rank, const py::bytes& token, std::uint64_t job,
                                unsigned local_processes, const py::object& describe,
                                double spin_us) {
  const std::string bytes = token;
  Token secret{};
  if (bytes.size() != secret.size()) {
    throw std::invalid_argument("token must have 16 bytes, not " + std::to_string(bytes.size()));
  }
  std::memcpy(secret.data(), bytes.data(), secret.size());
  return std::make_unique<Node>(rank, secret, job, local_processes, describe, spin_us);
}

}  // namespace

void bind_transport(py::module_& module) {
  bind_arrival(module);
  bind_torch_tensor(module);
  py::class_<Node> node(module, "Node", R"(The channels of one process in one job.

One thread at a time sends and one waits; put() may be called by any. All of it ends with close().)");
  node.def(py::init(&make_node), py::arg("rank"), py::arg("token"), py::arg("job"),
           py::arg("local_processes"), py::arg("describe") = py::none(), py::arg("spin_us") = -1.0,
           R"(Makes a process known to its peers as `rank`.

token: 16 bytes that only the processes of this job know. local_processes: busy processes on the
CPUs of this node, which decides how long waits spin; spin_us: instead, spin so long always.
describe(peer): text for error messages, asked once per peer by open().)");
  node.def("listen", &Node::listen, py::arg("kind"), py::arg("host") = "", py::arg("port") = 0,
           R"(Waits for peers with lower ranks from now on; returns the address for their open().

kind: "unix" for peers on this node, "tcp" for others, then with the numeric `host` to listen at.)");
  node.def(
      "open",
      [](Node& self, const std::string& kind, int peer, const std::string& address,
         double timeout_s,
         const py::kwargs& options) { self.open(kind, peer, address, timeout_s, options); },
      py::arg("kind"), py::arg("peer"), py::arg("address"), py::arg("timeout_s"),
      R"(Opens the channels to and from `peer`, which calls the same with this rank.

kind: "shm", "rdma", "tcp", or "loopback" to oneself. The lower rank connects to `address`, what
listen() gave the peer; the higher one listens. Options: slot_bytes, slots, limit_bytes, crc,
silent_limit_s; for shm also cuda_device, whose memory payloads are in, and cuda_refusal; for rdma also device, port, gid_index, mtu, num_qps. Raises DeadlineError,
TransportError.)");
  node.def("flush", &Node::flush, py::arg("timeout_s"),
           "Waits until no memory of what was sent is needed; False when the time was over.");
  node.def("pending", &Node::pending, py::arg("peer"), "Messages that flush() would wait for.");
  node.def("close", &Node::close, py::arg("timeout_s"),
           R"(Flushes, says goodbye to all peers and ends the channels. Idempotent.

Returns False when something was still pending after timeout_s. Views of what arrived stay valid.)");
  node.def("deliver_as", &Node::deliver_as, py::arg("type"), py::arg("least_free"),
           py::arg("direct"),
           R"(Makes poll() and wait() return arrivals as `type`, a subclass of Arrival.

least_free: take() copies where a channel has fewer free slots. direct: take() makes tensors by
itself, after use_torch(), instead of asking _take() of the subclass.)");
  node.def("info", &Node::info, py::arg("peer"), "What the channel to `peer` found and chose.");
  add_fast_methods(node);
}

}  // namespace adaptive
