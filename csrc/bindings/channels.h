// Classes that keep Python memory alive while a channel uses it, and a function that opens a
// channel of a given kind with named options.
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

// Collects Python objects that threads without the GIL no longer need, until a thread with the GIL
// releases them.
class DropList {
 public:
  void push(PyObject* object) noexcept;  // any thread; steals the reference
  void drain() noexcept;                 // needs the GIL

 private:
  std::mutex mutex_;
  std::vector<PyObject*> objects_;
  std::atomic<bool> any_{false};
};

// A reference to a Python object that owns memory. It is passed to the channel if the channel needs
// an owner of the memory. The GIL must be held during the construction and may be released
// afterwards.
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

// Like Kept, but keeps the storage of a tensor. Looks up the storage only if the channel needs an
// owner, and holds the GIL during the lookup.
class KeptStorage {
 public:
  KeptStorage(PyObject* tensor, const std::shared_ptr<DropList>& drops)
      : tensor_(tensor), drops_(drops) {}
  Keeper keeper();

 private:
  PyObject* tensor_;
  const std::shared_ptr<DropList>& drops_;
};

// Returns a new reference to the tensor's storage. A reference to the tensor would not be enough,
// because the program may give the tensor another storage before the message is sent.
PyObject* storage_of(PyObject* tensor);

// Creates the link to the peer, over which a channel is opened. Called without the GIL.
using MakeLink = std::function<Link(bool on_this_node, const Deadline&, const Tick&)>;

// Opens the channels of `kind` between session.rank and a peer. Needs the GIL, and releases it
// during waits. Throws py::type_error if this kind does not have one of the options,
// std::invalid_argument, and the errors of the channels.
std::unique_ptr<Sender> open_channel(const std::string& kind, const Session& session,
                                     const MakeLink& make_link, const pybind11::dict& given,
                                     const Deadline& deadline);

}  // namespace adaptive
