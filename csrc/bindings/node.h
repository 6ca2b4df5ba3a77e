// One process's end of all its channels, as Python sees it. See transport.cc for the Python side.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/channel.h"
#include "common/fork_guard.h"
#include "common/link.h"

namespace adaptive {

// Python objects that keep memory alive and are no longer needed, collected from threads without
// the GIL.
class DropList {
 public:
  void push(PyObject* object) noexcept;  // any thread, steals the reference
  void drain() noexcept;                 // with the GIL

 private:
  std::mutex mutex_;
  std::vector<PyObject*> objects_;
  std::atomic<bool> any_{false};
};

// All methods need the GIL; those that wait release it.
class Node {
 public:
  Node(int rank, const Token& token, std::uint64_t job, unsigned local_processes,
       pybind11::object describe, double spin_us);
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  std::string listen(const std::string& kind, const std::string& host, int port);
  void open(const std::string& kind, int peer, const std::string& address, double timeout_s,
            const pybind11::dict& options);

  void send(int peer, const Message& message, const void* data, PyObject* keep);
  void send_after(int peer, const Message& message, const void* data, bool on_device, void* stream,
                  PyObject* keep);
  std::optional<Reserved> reserve(int peer, std::size_t nbytes);
  void commit(int peer, const Message& message, Reserved reserved);

  // Memory that reserve() gave out and nobody committed, as far as is known: what is dropped is
  // forgotten only when it is reserved again.
  struct Place {
    const void* data;
    int peer;
    std::uint64_t token;
  };
  // The place that begins at `data`; null for none.
  const Place* reserved_at(const void* data) const noexcept;
  // As send(), of the tensor whose memory `data` is.
  void send_tensor(int peer, const Message& message, const void* data, PyObject* tensor);
  // From now on poll() and wait() return arrivals as `type`; see ArrivalForm.
  void deliver_as(const pybind11::object& type, long least_free, bool direct);
  void put(PyObject* item);
  pybind11::object poll();
  pybind11::object wait(const Deadline& deadline);

  bool flush(double timeout_s);
  std::size_t pending(int peer) const;
  bool close(double timeout_s);
  Info info(int peer) const;

 private:
  struct Parts;

  Parts& parts() const;
  Sender& sender_to(int peer) const;
  Link link_to(const std::string& kind, bool on_this_node, int peer, const std::string& address,
               const Deadline& deadline, const Tick& tick);
  pybind11::object open_item(Item&& item);
  template <typename Condition>
  void forget(const Condition& condition) noexcept;
  bool flush_all(double timeout_s);
  void drop_all() noexcept;

  const int rank_;
  const Token token_;
  const ForkGuard guard_;
  std::unique_ptr<Parts> parts_;  // null after close()
  std::vector<Place> reserved_;   // few: searched one by one
  bool waiting_ = false;          // guarded by the GIL, as is the next
  bool sending_ = false;
};

}  // namespace adaptive
