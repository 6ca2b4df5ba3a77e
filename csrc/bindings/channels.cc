#include "bindings/channels.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <utility>

#include "rdma/channel.h"
#include "shm/channel.h"
#include "tcp/channel.h"

namespace py = pybind11;

namespace adaptive {
namespace {

std::shared_ptr<void> owner_of(PyObject* reference, const std::shared_ptr<DropList>& drops) {
  return {reference, [drops](void* object) { drops->push(static_cast<PyObject*>(object)); }};
}

// Disables the garbage collector. A channel holds its mutex while it calls Keeper::make, and
// objects that the collector destroys might need the same mutex.
class NoCollection {
 public:
  NoCollection() : collects_(PyGC_Disable() != 0) {}
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;
  ~NoCollection() {
    if (collects_) {
      PyGC_Enable();
    }
  }

 private:
  bool collects_;
};

// Reads options by name, and rejects options that no channel of this kind reads.
class Options {
 public:
  explicit Options(const py::dict& given) : given_(given) {}

  template <typename Value>
  void read(const char* name, Value& value) {
    known_.insert(name);
    if (!given_.contains(name) || given_[name].is_none()) {
      return;
    }
    try {
      value = given_[name].cast<Value>();
    } catch (const py::cast_error&) {
      throw py::type_error(std::string(name) + " cannot be " + std::string(py::repr(given_[name])));
    }
  }

  void read_seconds(const char* name, std::chrono::milliseconds& value) {
    double seconds = std::chrono::duration<double>(value).count();
    read(name, seconds);
    if (!(seconds > 0.0 && seconds < 1e8)) {
      throw std::invalid_argument(std::string(name) + " " + std::to_string(seconds) +
                                  " must be above 0 and below 1e8");
    }
    value = std::chrono::milliseconds(std::max<std::int64_t>(1, std::llround(seconds * 1e3)));
  }

  void done(const std::string& kind) const {
    for (const auto& entry : given_) {
      const auto name = entry.first.cast<std::string>();
      if (known_.count(name) == 0) {
        throw py::type_error(kind + " has no option '" + name + "'");
      }
    }
  }

 private:
  const py::dict& given_;
  std::set<std::string> known_;
};

}  // namespace

void DropList::push(PyObject* object) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    objects_.push_back(object);
    any_.store(true, std::memory_order_release);
  } catch (...) {
    // If there is no memory for the list entry, the object is never released.
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

Keeper Kept::keeper() {
  return {[](void* context) {
            auto* const self = static_cast<Kept*>(context);
            std::shared_ptr<void> owner = owner_of(self->reference_.ptr(), self->drops_);
            self->reference_.release();
            return owner;
          },
          this};
}

Keeper KeptStorage::keeper() {
  return {[](void* context) {
            auto* const self = static_cast<KeptStorage*>(context);
            const NoCollection pause;
            return owner_of(storage_of(self->tensor_), self->drops_);
          },
          this};
}

PyObject* storage_of(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("untyped_storage");
  PyObject* const storage = PyObject_CallMethodNoArgs(tensor, name);
  if (storage == nullptr) {
    throw py::error_already_set();
  }
  return storage;
}

std::unique_ptr<Sender> open_channel(const std::string& kind, const Session& session,
                                     const MakeLink& make_link, const py::dict& given,
                                     const Deadline& deadline) {
  Options options(given);
  const auto connect = [&](auto& chosen, const auto& open) {
    options.read("slot_bytes", chosen.slot_bytes);
    options.read("slots", chosen.slots);
    options.read("limit_bytes", chosen.limit_bytes);
    options.read("crc", chosen.crc);
    options.read_seconds("silent_limit_s", chosen.silent_limit);
    options.read("reservable", chosen.reservable);
    options.done(kind);
    const Tick tick = [] {
      const py::gil_scoped_acquire acquire;
      run_signal_handlers();
    };
    const py::gil_scoped_release release;
    Link link = make_link(kind == "shm", deadline, tick);
    return open(session, std::move(link), chosen, deadline, tick);
  };
  if (kind == "shm") {
    ShmOptions chosen;
    options.read("turn_name", chosen.turn_name);
    options.read("cuda_device", chosen.cuda_device);
    options.read("cuda_refusal", chosen.cuda_refusal);
    options.read("cuda_driver", chosen.cuda_driver);
    return connect(chosen, open_shm);
  }
  if (kind == "tcp") {
    TcpOptions chosen;
    return connect(chosen, open_tcp);
  }
  if (kind == "rdma") {
    RdmaOptions chosen;
    options.read("device", chosen.device);
    options.read("near_pci", chosen.near_pci);
    options.read("port", chosen.port);
    options.read("gid_index", chosen.gid_index);
    options.read("mtu", chosen.mtu_bytes);
    options.read("num_qps", chosen.num_qps);
    options.read("ack_timeout", chosen.ack_timeout);
    return connect(chosen, open_rdma);
  }
  throw std::invalid_argument("kind '" + kind + "' must be shm, rdma or tcp");
}

}  // namespace adaptive
