// Owners of Python memory that channels use, and functions that open channels from a kind and named
// options.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bindings/python.h"
#include "common/channel.h"
#include "common/link.h"

namespace adaptive {

// Collects Python objects that are no longer needed from threads without the GIL.
class DropList {
 public:
  void push(PyObject* object) noexcept;  // any thread; steals the reference
  void drain() noexcept;                 // needs the GIL

 private:
  std::mutex mutex_;
  std::vector<PyObject*> objects_;
  std::atomic<bool> any_{false};
};

// A reference to an object, which is passed to the channel if the channel needs an owner of the
// memory. Must be created with the GIL, which may be released afterwards.
class Kept {
 public:
  Kept(PyObject* object, std::shared_ptr<DropList> drops)
      : reference_(pybind11::reinterpret_borrow<pybind11::object>(object)),
        drops_(std::move(drops)) {}
  Keeper keeper();

 private:
  pybind11::object reference_;
  std::shared_ptr<DropList> drops_;
};

// The same for a tensor's storage, which is fetched only if the channel needs an owner. Holds the
// GIL during the fetch.
class KeptStorage {
 public:
  KeptStorage(PyObject* tensor, const std::shared_ptr<DropList>& drops)
      : tensor_(tensor), drops_(drops) {}
  Keeper keeper();

 private:
  PyObject* tensor_;
  const std::shared_ptr<DropList>& drops_;
};

// Returns a new reference to the storage. A reference to the tensor would not be enough: its owner
// may replace its storage before the message is sent.
PyObject* storage_of(PyObject* tensor);

// Makes a channel's initial connection to the peer. Called without the GIL.
using MakeLink = std::function<Link(bool on_this_node, const Deadline&, const Tick&)>;

// Opens the channels of `kind` between session.rank and a peer. Needs the GIL, which is released
// during waits. Throws py::type_error for an option that the kind does not have,
// std::invalid_argument, and the errors of the channels.
std::unique_ptr<Sender> open_channel(const std::string& kind, const Session& session,
                                     const MakeLink& make_link, const pybind11::dict& given,
                                     const Deadline& deadline);

}  // namespace adaptive
