#include "bindings/node.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "bindings/arrival.h"
#include "bindings/open_channel.h"
#include "bindings/python.h"
#include "common/completions.h"
#include "common/reactor.h"

namespace py = pybind11;

namespace adaptive {
namespace {

// Copies of this size and above take so long that other threads should run meanwhile.
constexpr std::uint64_t kLongCopyBytes = 256 * 1024;

// Refuses a second thread instead of making it wait. Needs the GIL, at both ends.
class Busy {
 public:
  Busy(bool& flag, const char* what) : flag_(flag) {
    if (flag_) {
      throw std::runtime_error(std::string("two threads ") + what + " at the same time");
    }
    flag_ = true;
  }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;
  ~Busy() { flag_ = false; }

 private:
  bool& flag_;
};

// What is told about peers in error messages. Filled by open(), read by any thread: asking Python
// then could wait for the GIL in the hands of one who waits for that thread.
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

struct KeepRequest {
  PyObject* object;
  std::shared_ptr<DropList> drops;
  bool taken = false;
};

std::shared_ptr<void> keep_object(void* context) {
  auto* const request = static_cast<KeepRequest*>(context);
  request->taken = true;
  return {request->object,
          [drops = request->drops](void* object) { drops->push(static_cast<PyObject*>(object)); }};
}

struct StorageRequest {
  PyObject* tensor;
  std::shared_ptr<DropList>* drops;
};

// Not the tensor: its owner may put another storage into it before this one is sent.
PyObject* storage_of(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("untyped_storage");
  PyObject* const storage = PyObject_CallMethodNoArgs(tensor, name);
  if (storage == nullptr) {
    throw py::error_already_set();
  }
  return storage;
}

// With the GIL. A channel's mutex is held: what the garbage collector ends might want it.
std::shared_ptr<void> keep_storage(void* context) {
  auto* const request = static_cast<StorageRequest*>(context);
  const bool collects = PyGC_Disable() != 0;
  const auto restore = [&] {
    if (collects) {
      PyGC_Enable();
    }
  };
  try {
    PyObject* const storage = storage_of(request->tensor);
    std::shared_ptr<void> kept{storage, [drops = *request->drops](void* object) {
                                 drops->push(static_cast<PyObject*>(object));
                               }};
    restore();
    return kept;
  } catch (...) {
    restore();
    throw;
  }
}

}  // namespace

// ---- DropList

void DropList::push(PyObject* object) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    objects_.push_back(object);
    any_.store(true, std::memory_order_release);
  } catch (...) {
    // Without memory for the list the object stays for ever.
  }
}

void DropList::drain() noexcept {
  if (!any_.load(std::memory_order_acquire)) {
    return;
  }
  std::vector<PyObject*> objects;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    objects.swap(objects_);
    any_.store(false, std::memory_order_release);
  }
  for (PyObject* object : objects) {
    Py_DECREF(object);
  }
}

// ---- Node

struct Node::Parts {
  Session session;
  std::shared_ptr<DropList> drops = std::make_shared<DropList>();
  std::shared_ptr<Descriptions> descriptions = std::make_shared<Descriptions>();
  py::object describe;
  std::optional<Listener> unix_listener;
  std::optional<Listener> tcp_listener;
  std::vector<std::pair<int, std::unique_ptr<Sender>>> senders;  // few: searched one by one
  ArrivalForm form = plain_arrivals();
  bool closed = false;
};

Node::Node(int rank, const Token& token, std::uint64_t job, unsigned local_processes,
           py::object describe, double spin_us)
    : rank_(rank), token_(token), parts_(std::make_unique<Parts>()) {
  parts_->describe = std::move(describe);
  Session& session = parts_->session;
  session.completions = std::make_shared<Completions>(local_processes, spin_us);
  session.reactor = std::make_shared<Reactor>();
  session.job = job;
  session.rank = rank;
  session.local_processes = local_processes;
  session.describe = [descriptions = parts_->descriptions](int peer) {
    return descriptions->get(peer);
  };
}

Node::~Node() {
  if (!guard_.in_maker()) {
    parts_.release();  // threads and peers belong to the process that made them
    return;
  }
  drop_all();
  // What nobody took: it may own objects of Python, or channels.
  while (const auto item = parts_->session.completions->poll()) {
    if (const auto* posted = std::get_if<Posted>(&*item)) {
      Py_DECREF(reinterpret_cast<PyObject*>(static_cast<std::uintptr_t>(posted->item)));
    }
  }
}

void Node::drop_all() noexcept {
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

Node::Parts& Node::parts() const {
  if (!guard_.in_maker()) {
    throw Error("the channels of rank " + std::to_string(rank_) +
                " belong to the process that made them, not to its child " +
                std::to_string(::getpid()));
  }
  parts_->drops->drain();
  return *parts_;
}

Sender& Node::sender_to(int peer) const {
  Parts& all = parts();
  for (const auto& entry : all.senders) {
    if (entry.first == peer) {
      return *entry.second;
    }
  }
  throw Error("rank " + std::to_string(rank_) + " has no channel to rank " + std::to_string(peer) +
              (all.closed ? ": all are closed" : ""));
}

std::string Node::listen(const std::string& kind, const std::string& host, int port) {
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

Link Node::link_to(const std::string& kind, bool on_this_node, int peer, const std::string& address,
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

void Node::open(const std::string& kind, int peer, const std::string& address, double timeout_s,
                const py::dict& options) {
  Parts& all = parts();
  const Busy busy(sending_, "open or use channels");
  if (all.closed) {
    throw Error("rank " + std::to_string(rank_) + " has closed its channels");
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
  auto sender = open_channel(kind, all.session, peer, link, options, deadline_after(timeout_s));
  all.senders.emplace_back(peer, std::move(sender));
}

void Node::send(int peer, const Message& message, const void* data, PyObject* keep) {
  Sender& sender = sender_to(peer);
  const Busy busy(sending_, "send");
  KeepRequest request{keep, parts_->drops};
  const Keeper keeper{&keep_object, &request};
  // The reference that a kept object needs is made here, since below the GIL may be given away.
  py::object reference = py::reinterpret_borrow<py::object>(keep);
  const auto finish = [&] {
    if (request.taken) {
      reference.release();
    }
  };
  try {
    if (message.nbytes >= kLongCopyBytes) {
      const py::gil_scoped_release release;
      sender.send(message, data, keeper);
    } else {
      sender.send(message, data, keeper);
    }
  } catch (...) {
    finish();
    throw;
  }
  finish();
}

void Node::send_tensor(int peer, const Message& message, const void* data, PyObject* tensor) {
  if (message.nbytes >= kLongCopyBytes) {
    const auto storage = py::reinterpret_steal<py::object>(storage_of(tensor));
    send(peer, message, data, storage.ptr());
    return;
  }
  Sender& sender = sender_to(peer);
  const Busy busy(sending_, "send");
  StorageRequest request{tensor, &parts_->drops};
  sender.send(message, data, {&keep_storage, &request});
}

void Node::send_after(int peer, const Message& message, const void* data, bool on_device,
                      void* stream, PyObject* keep) {
  Sender& sender = sender_to(peer);
  const Busy busy(sending_, "send");
  KeepRequest request{keep, parts_->drops};
  const py::object reference = py::reinterpret_borrow<py::object>(keep);
  try {
    sender.send_after(message, data, on_device, stream, {&keep_object, &request});
  } catch (...) {
    // Had it been taken, the list of drops has it by now.
    if (request.taken) {
      reference.inc_ref();
    }
    throw;
  }
  if (request.taken) {
    reference.inc_ref();
  }
}

std::optional<Reserved> Node::reserve(int peer, std::size_t nbytes) {
  Sender& sender = sender_to(peer);
  const Busy busy(sending_, "send");
  auto reserved = sender.reserve(nbytes);
  if (reserved) {
    forget([data = reserved->memory.data()](const Place& place) { return place.data == data; });
    reserved_.push_back({reserved->memory.data(), peer, reserved->token});
  }
  return reserved;
}

template <typename Condition>
void Node::forget(const Condition& condition) noexcept {
  reserved_.erase(std::remove_if(reserved_.begin(), reserved_.end(), condition), reserved_.end());
}

const Node::Place* Node::reserved_at(const void* data) const noexcept {
  for (const Place& place : reserved_) {
    if (place.data == data) {
      return &place;
    }
  }
  return nullptr;
}

void Node::commit(int peer, const Message& message, Reserved reserved) {
  Sender& sender = sender_to(peer);
  const Busy busy(sending_, "send");
  forget([peer, token = reserved.token](const Place& place) {
    return place.peer == peer && place.token == token;
  });
  sender.commit(message, std::move(reserved));
}

void Node::deliver_as(const py::object& type, long least_free, bool direct) {
  check_arrival_type(type);
  parts().form = {type, least_free, direct};
}

void Node::put(PyObject* item) {
  Parts& all = parts();
  all.session.completions->put(Posted{reinterpret_cast<std::uintptr_t>(item)});
  Py_INCREF(item);
}

py::object Node::open_item(Item&& item) {
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

py::object Node::poll() {
  Completions& completions = *parts().session.completions;
  const Busy busy(waiting_, "wait");
  auto item = completions.poll();
  return item ? open_item(std::move(*item)) : py::none();
}

py::object Node::wait(const Deadline& deadline) {
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

bool Node::flush_all(double timeout_s) {
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

bool Node::flush(double timeout_s) {
  parts();
  const Busy busy(sending_, "send");
  return flush_all(timeout_s);
}

std::size_t Node::pending(int peer) const {
  return sender_to(peer).pending();
}

bool Node::close(double timeout_s) {
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
    // Who waits hears of a lost peer; this end is closed all the same.
  } catch (...) {
    drop_all();
    throw;
  }
  drop_all();
  return flushed;
}

Info Node::info(int peer) const {
  return sender_to(peer).info();
}

}  // namespace adaptive
