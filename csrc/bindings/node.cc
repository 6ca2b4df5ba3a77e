// The Python class Node: all channels of one process in one job.
//
// Methods that run once per message get their arguments as an array (METH_FASTCALL). pybind11
// handles the others.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrival.h"
#include "bindings/channels.h"
#include "bindings/python.h"
#include "bindings/tensors.h"
#include "common/channel.h"
#include "common/fork_guard.h"
#include "common/link.h"
#include "common/reactor.h"

namespace py = pybind11;

namespace adaptive {
namespace {

// Copies of this size and above take so long that the GIL is released during the copy.
constexpr std::uint64_t kLongCopyBytes = 256 * 1024;

// Descriptions of peers for error messages. Filled by open() and read by any thread. Calling Python
// for a description instead could deadlock: the thread that holds the GIL may be waiting for the
// thread that needs it.
class Descriptions {
 public:
  void set(int peer, std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    texts_[peer] = std::move(text);
  }
  std::string get(int peer) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = texts_.find(peer);
    return place == texts_.end() ? "rank " + std::to_string(peer) : place->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<int, std::string> texts_;
};

// ---- Node

// This process's end of all its channels. All methods need the GIL, and release it during waits.
class Node {
 public:
  // Memory that reserve() returned and that has not been committed. A reservation that the caller
  // dropped stays in the list until the same memory is reserved again.
  struct Reservation {
    const void* data;
    int peer;
    std::uint64_t token;
  };

  Node(int rank, const Token& token, std::uint64_t job, unsigned local_processes,
       py::object describe)
      : rank_(rank), token_(token), parts_(std::make_unique<Parts>()) {
    parts_->describe = std::move(describe);
    Session& session = parts_->session;
    session.completions = std::make_shared<Completions>(local_processes);
    session.reactor = std::make_shared<Reactor>();
    session.job = job;
    session.rank = rank;
    session.local_processes = local_processes;
    session.describe = [descriptions = parts_->descriptions](int peer) {
      return descriptions->get(peer);
    };
  }
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  ~Node() {
    if (!guard_.in_maker()) {
      parts_.release();  // threads and peers belong to the process that created them
      return;
    }
    drop_all();
    // Destroys the arrivals that nobody took, which may own Python objects or channels.
    while (const auto item = parts_->session.completions->poll()) {
      if (const auto* posted = std::get_if<Posted>(&*item)) {
        Py_DECREF(reinterpret_cast<PyObject*>(static_cast<std::uintptr_t>(posted->item)));
      }
    }
  }

  std::string listen(const std::string& kind, const std::string& host, int port) {
    Parts& all = parts();
    const bool on_node = kind == "unix";
    if (!on_node && kind != "tcp") {
      throw std::invalid_argument("kind '" + kind + "' must be 'unix' or 'tcp'");
    }
    auto& listener = on_node ? all.unix_listener : all.tcp_listener;
    if (!listener) {
      const Identity self{token_, rank_, ""};
      listener = on_node ? Listener::on_unix(self) : Listener::on_tcp(host, port, self);
    }
    return listener->address();
  }

  void open(const std::string& kind, int peer, const std::string& address, double timeout_s,
            const py::dict& options) {
    Parts& all = parts();
    const Busy busy(sending_, "open or use channels");
    if (all.closed) {
      throw Error("rank " + std::to_string(rank_) + " has closed its channels");
    }
    if (peer == rank_) {
      throw std::invalid_argument("rank " + std::to_string(rank_) + " has no channel to itself");
    }
    const bool there = std::any_of(all.senders.begin(), all.senders.end(),
                                   [&](const auto& entry) { return entry.first == peer; });
    if (there) {
      throw Error("rank " + std::to_string(rank_) + " already has a channel to rank " +
                  std::to_string(peer));
    }
    if (!all.describe.is_none()) {
      all.descriptions->set(peer, py::str(all.describe(peer)));
    }
    all.senders.reserve(all.senders.size() + 1);
    const auto link = [&](bool on_this_node, const Deadline& deadline, const Tick& tick) {
      return link_to(kind, on_this_node, peer, address, deadline, tick);
    };
    auto sender = open_channel(kind, all.session, link, options, deadline_after(timeout_s));
    all.senders.emplace_back(peer, std::move(sender));
  }

  // Sends memory that `keep` owns. For streams see Sender::send_after().
  void send(int peer, const Message& message, const void* data, PyObject* keep) {
    Sender& sender = sender_to(peer);
    const Busy busy(sending_, "send");
    Kept kept(keep, parts_->drops);
    if (message.nbytes >= kLongCopyBytes) {
      const py::gil_scoped_release release;
      sender.send(message, data, kept.keeper());
    } else {
      sender.send(message, data, kept.keeper());
    }
  }
  void send_after(int peer, const Message& message, const void* data, bool on_device, void* stream,
                  PyObject* keep) {
    Sender& sender = sender_to(peer);
    const Busy busy(sending_, "send");
    Kept kept(keep, parts_->drops);
    sender.send_after(message, data, on_device, stream, kept.keeper());
  }

  // Like send(), for the tensor with the memory at `data`.
  void send_tensor(int peer, const Message& message, const void* data, PyObject* tensor) {
    if (message.nbytes >= kLongCopyBytes) {
      const auto storage = py::reinterpret_steal<py::object>(storage_of(tensor));
      send(peer, message, data, storage.ptr());
      return;
    }
    Sender& sender = sender_to(peer);
    const Busy busy(sending_, "send");
    KeptStorage kept(tensor, parts_->drops);
    sender.send(message, data, kept.keeper());
  }

  std::optional<Reserved> reserve(int peer, std::size_t nbytes) {
    Sender& sender = sender_to(peer);
    const Busy busy(sending_, "send");
    auto reserved = sender.reserve(nbytes);
    if (reserved) {
      forget([data = reserved->memory.data()](const Reservation& place) {
        return place.data == data;
      });
      reserved_.push_back({reserved->memory.data(), peer, reserved->token});
    }
    return reserved;
  }

  // Returns the reservation that begins at `data`, or null.
  const Reservation* reserved_at(const void* data) const noexcept {
    for (const Reservation& place : reserved_) {
      if (place.data == data) {
        return &place;
      }
    }
    return nullptr;
  }

  void commit(int peer, const Message& message, Reserved reserved) {
    Sender& sender = sender_to(peer);
    const Busy busy(sending_, "send");
    forget([peer, token = reserved.token](const Reservation& place) {
      return place.peer == peer && place.token == token;
    });
    sender.commit(message, std::move(reserved));
  }

  // Sets the type of the arrivals that poll() and wait() return; see ArrivalForm.
  void deliver_as(const py::object& type, long least_free) {
    check_arrival_type(type);
    parts().form = {type, least_free};
  }

  void put(PyObject* item) {
    Parts& all = parts();
    all.session.completions->put(Posted{reinterpret_cast<std::uintptr_t>(item)});
    Py_INCREF(item);
  }

  py::object poll() {
    Completions& completions = *parts().session.completions;
    const Busy busy(waiting_, "wait");
    auto item = completions.poll();
    return item ? open_item(std::move(*item)) : py::none();
  }

  py::object wait(const Deadline& deadline) {
    Completions& completions = *parts().session.completions;
    const Busy busy(waiting_, "wait");
    auto item = completions.poll();
    if (item) {
      return open_item(std::move(*item));
    }
    for (;;) {
      {
        const py::gil_scoped_release release;
        item = completions.wait(deadline, kSlice);
      }
      if (item) {
        return open_item(std::move(*item));
      }
      if (deadline.expired()) {
        return py::none();
      }
      run_signal_handlers();
      parts_->drops->drain();
    }
  }

  bool flush(double timeout_s) {
    parts();
    const Busy busy(sending_, "send");
    return flush_all(timeout_s);
  }
  std::size_t pending(int peer) const { return sender_to(peer).pending(); }
  bool close(double timeout_s) {
    Parts& all = parts();
    const Busy busy_sending(sending_, "close or use channels");
    const Busy busy_waiting(waiting_, "close or use channels");
    if (all.closed) {
      return true;
    }
    for (const auto& entry : all.senders) {
      entry.second->close();
    }
    bool flushed = false;
    try {
      flushed = flush_all(timeout_s);
    } catch (const Error&) {
      // A lost peer is reported to the caller that waits for arrivals. This end is closed in any
      // case.
    } catch (...) {
      drop_all();
      throw;
    }
    drop_all();
    return flushed;
  }
  Info info(int peer) const { return sender_to(peer).info(); }

 private:
  struct Parts {
    Session session;
    std::shared_ptr<DropList> drops = std::make_shared<DropList>();
    std::shared_ptr<Descriptions> descriptions = std::make_shared<Descriptions>();
    py::object describe;
    std::optional<Listener> unix_listener;
    std::optional<Listener> tcp_listener;
    std::vector<std::pair<int, std::unique_ptr<Sender>>> senders;  // only a few: linear search
    ArrivalForm form = plain_arrivals();
    bool closed = false;
  };

  void drop_all() noexcept {
    std::vector<std::pair<int, std::unique_ptr<Sender>>> senders;
    senders.swap(parts_->senders);
    {
      const py::gil_scoped_release release;
      senders.clear();
      parts_->unix_listener.reset();
      parts_->tcp_listener.reset();
      parts_->session.reactor.reset();
    }
    parts_->closed = true;
    parts_->drops->drain();
  }

  Parts& parts() const {
    if (!guard_.in_maker()) {
      throw Error("the channels of rank " + std::to_string(rank_) +
                  " belong to the process that made them, not to its child " +
                  std::to_string(::getpid()));
    }
    parts_->drops->drain();
    return *parts_;
  }

  Sender& sender_to(int peer) const {
    Parts& all = parts();
    for (const auto& entry : all.senders) {
      if (entry.first == peer) {
        return *entry.second;
      }
    }
    throw Error("rank " + std::to_string(rank_) + " has no channel to rank " +
                std::to_string(peer) + (all.closed ? ": all are closed" : ""));
  }

  Link link_to(const std::string& kind, bool on_this_node, int peer, const std::string& address,
               const Deadline& deadline, const Tick& tick) {
    if (peer < rank_) {
      auto& listener = on_this_node ? parts_->unix_listener : parts_->tcp_listener;
      if (!listener) {
        throw Error("rank " + std::to_string(rank_) + " opens a channel to rank " +
                    std::to_string(peer) + ", which is lower, before listen(\"" +
                    (on_this_node ? "unix" : "tcp") + "\")");
      }
      return listener->accept(peer, kind, deadline, tick);
    }
    const Identity self{token_, rank_, kind};
    if (on_this_node) {
      return connect_unix(address, self, peer, deadline, tick);
    }
    const std::size_t colon = address.rfind(':');
    int port = 0;
    try {
      port = std::stoi(address.substr(colon == std::string::npos ? 0 : colon + 1));
    } catch (const std::exception&) {
      throw std::invalid_argument("address '" + address + "' must be host:port");
    }
    std::string host = address.substr(0, colon);
    if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
      host = host.substr(1, host.size() - 2);
    }
    return connect_tcp(host, port, self, peer, deadline, tick);
  }

  template <typename Condition>
  void forget(const Condition& condition) noexcept {
    reserved_.erase(std::remove_if(reserved_.begin(), reserved_.end(), condition), reserved_.end());
  }

  py::object open_item(Item&& item) {
    if (auto* arrival = std::get_if<Arrival>(&item)) {
      return make_arrival(std::move(*arrival), parts_->form);
    }
    if (const auto* posted = std::get_if<Posted>(&item)) {
      return py::reinterpret_steal<py::object>(
          reinterpret_cast<PyObject*>(static_cast<std::uintptr_t>(posted->item)));
    }
    const auto& failure = std::get<Failure>(item);
    if (failure.kind == Failure::Kind::kPeerLost) {
      throw PeerLostError(failure.text);
    }
    throw Error(failure.text);
  }

  bool flush_all(double timeout_s) {
    const Deadline deadline = deadline_after(timeout_s);
    for (const auto& entry : parts_->senders) {
      Sender& sender = *entry.second;
      for (bool flushed = sender.pending() == 0; !flushed;) {
        {
          const py::gil_scoped_release release;
          flushed = sender.flush(deadline.at_most(kSlice));
        }
        if (!flushed && deadline.expired()) {
          return false;
        }
        run_signal_handlers();
      }
    }
    parts_->drops->drain();
    return true;
  }

  const int rank_;
  const Token token_;
  const ForkGuard guard_;
  std::unique_ptr<Parts> parts_;       // null in a forked child after its end
  std::vector<Reservation> reserved_;  // only a few: linear search
  bool waiting_ = false;               // guarded by the GIL, like the next member
  bool sending_ = false;
};

Node& node_of(PyObject* self) {
  // The method descriptor has checked the type. pybind11's own conversion to a pointer takes longer
  // than the rest of the call.
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

// `args` begins with step, kind, chunk and microbatch.
void fill_label(Message& message, PyObject* const* args) {
  message.step = as_int(args[0]);
  message.kind = static_cast<MessageKind>(narrow<std::uint8_t>(args[1], "kind"));
  if (message.kind == MessageKind::kEnd) {
    throw std::invalid_argument("kind 255 is reserved for close()");
  }
  message.chunk = narrow<std::int32_t>(args[2], "chunk");
  message.microbatch = narrow<std::int32_t>(args[3], "microbatch");
}

// `args` contains step, kind, chunk, microbatch, dtype_code, variant and shape.
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
    if (const Node::Reservation* const place = node.reserved_at(data); place == nullptr) {
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
    const Node::Reservation* const place = node_of(self).reserved_at(address_of(address));
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
     "`keep` is kept alive until its memory is no longer needed; do not write to it before.\n\n"
     "Raises PeerLostError, TransportError."},
    {"send_after", as_method(&node_send_after), METH_FASTCALL,
     "send_after(peer, step, kind, chunk, microbatch, dtype_code, variant, shape, data_ptr, "
     "nbytes, on_device, stream, keep)\n\nLike send(), for a tensor that is computed by work "
     "already queued on `stream`, a CUstream as a number. The tensor at data_ptr is either in host "
     "memory or, if it fits into a slot, in the memory of this process's GPU. If gpu_path is "
     "cuda-ipc in info(), all messages must be sent with this method."},
    {"send_tensor", as_method(&node_send_tensor), METH_FASTCALL,
     "send_tensor(peer, step, kind, chunk, microbatch, tensor)\n\nLike send(), for a contiguous "
     "CPU tensor, or like commit() if the tensor begins at reserved memory of the channel. For "
     "other "
     "tensors and memory of another channel, sends nothing and returns False. Needs use_torch()."},
    {"commit", as_method(&node_commit), METH_FASTCALL,
     "commit(peer, token, step, kind, chunk, microbatch, dtype_code, variant, shape)\n\nSends the "
     "payload in reserved memory without a copy. The memory may be read afterwards, but not "
     "written."},
    {"reserve_tensor", as_method(&node_reserve_tensor), METH_FASTCALL,
     "reserve_tensor(peer, dtype_code, shape)\n\nReturns a tensor in memory of the channel, to "
     "send with send_tensor() or commit(). Returns None if it is empty or no memory is free. "
     "Destroying an unsent tensor returns the memory. Needs use_torch()."},
    {"reserved_at", as_method(&node_reserved_at), METH_O,
     "reserved_at(address)\n\nReturns (peer, token) of uncommitted reserved memory that begins at "
     "the address, or None."},
    {"poll", as_method(&node_poll), METH_NOARGS,
     "poll()\n\nReturns the oldest arrival or item from put(), or None if there is none.\n\nRaises "
     "PeerLostError or TransportError once for each channel that failed."},
    {"wait_until", as_method(&node_wait_until), METH_O,
     "wait_until(deadline_s)\n\nLike poll(), but waits without the GIL. Returns None if no item "
     "came before `deadline_s`, a time of time.monotonic() or -inf or inf. Reads the clock only if "
     "no item comes soon."},
    {"put", as_method(&node_put), METH_O,
     "put(item)\n\nAdds any object to the items of poll() and wait_until(). May be called "
     "from any thread."},
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
                                unsigned local_processes, const py::object& describe) {
  const std::string bytes = token;
  Token secret{};
  if (bytes.size() != secret.size()) {
    throw std::invalid_argument("token must have 16 bytes, not " + std::to_string(bytes.size()));
  }
  std::memcpy(secret.data(), bytes.data(), secret.size());
  return std::make_unique<Node>(rank, secret, job, local_processes, describe);
}

}  // namespace

void bind_transport(py::module_& module) {
  bind_arrival(module);
  bind_tensors(module);
  py::class_<Node> node(module, "Node", R"(All channels of one process in one job.

One thread at a time may send and one may wait; any thread may call put(). close() ends all.)");
  node.def(py::init(&make_node), py::arg("rank"), py::arg("token"), py::arg("job"),
           py::arg("local_processes"), py::arg("describe") = py::none(),
           R"(Creates the channels of the process with number `rank`.

token: 16 bytes that only the processes of this job know. local_processes: number of busy processes
on this node's CPUs; determines how long waits spin.
describe(peer): returns text for error messages; open() calls it once per peer.)");
  node.def("listen", &Node::listen, py::arg("kind"), py::arg("host") = "", py::arg("port") = 0,
           R"(Starts to listen for peers with lower ranks. Returns the address for their open().

kind: "unix" for peers on this node, or "tcp" for other peers, with the numeric address `host`.)");
  node.def(
      "open",
      [](Node& self, const std::string& kind, int peer, const std::string& address,
         double timeout_s,
         const py::kwargs& options) { self.open(kind, peer, address, timeout_s, options); },
      py::arg("kind"), py::arg("peer"), py::arg("address"), py::arg("timeout_s"),
      R"(Opens the channels to and from `peer`, which must make the same call with this rank.

kind: "shm", "rdma" or "tcp". The lower rank connects to `address`, the result of the peer's
listen(); the higher rank listens. Options: slot_bytes, slots, limit_bytes, crc, silent_limit_s,
reservable; for shm also turn_name, cuda_device (the GPU with the payloads) and cuda_refusal;
for rdma also device, near_pci, port, gid_index, mtu, num_qps, ack_timeout. Raises DeadlineError,
TransportError.)");
  node.def("flush", &Node::flush, py::arg("timeout_s"),
           "Waits until the memory of sent tensors is no longer needed. Returns False on timeout.");
  node.def("pending", &Node::pending, py::arg("peer"),
           "Number of messages that flush() would wait for.");
  node.def("close", &Node::close, py::arg("timeout_s"),
           R"(Flushes, says goodbye to all peers and closes the channels. Idempotent.

Returns False if messages were still pending after timeout_s. Views of arrivals stay valid.)");
  node.def("deliver_as", &Node::deliver_as, py::arg("type"), py::arg("least_free"),
           R"(Makes poll() and wait_until() return arrivals as `type`, a subclass of Arrival.

least_free: take() copies if a channel has fewer free slots.)");
  node.def("info", &Node::info, py::arg("peer"), "Properties of the channel to `peer`.");
  add_fast_methods(node);
}

}  // namespace adaptive
