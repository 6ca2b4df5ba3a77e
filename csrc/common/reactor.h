// The background thread of a process. It watches descriptors (sockets of peers, their pidfds,
// credit signals, RDMA completion channels) and timers, so that messages progress and lost peers
// are noticed while the process computes. It never holds the GIL.
//
// A forked child does not have this thread. In the child, add() and every() throw, and all other
// methods do nothing. Destroying the child's copies of channels therefore does not affect the
// parent.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

namespace adaptive {

class Reactor {
 public:
  using Handler = std::function<void(std::uint32_t epoll_events)>;
  using Task = std::function<void()>;

  Reactor();   // starts the thread, with all signals blocked. Throws SystemError.
  ~Reactor();  // stops and joins it
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  // Calls `handler` on the reactor's thread whenever the descriptor has one of `events` (level
  // triggered). The caller owns the descriptor and must remove it before closing it. If the handler
  // throws, the descriptor is removed, and the error is passed to on_error. Throws SystemError.
  void add(int fd, std::uint32_t events, Handler handler,
           std::function<void(const std::exception&)> on_error);
  void modify(int fd, std::uint32_t events);
  // After this returns, the handler does not run any more (unless the handler itself made the
  // call).
  void remove(int fd) noexcept;

  // Runs `task` once, soon, on the reactor's thread, or not at all if the reactor stops first. If
  // the task throws, the next add() or every() rethrows the exception.
  void post(Task task);

  // Runs `task` every `period` until it is cancelled; returns the timer's id.
  std::uint64_t every(std::chrono::milliseconds period, Task task);
  void stop(std::uint64_t timer) noexcept;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;  // shared with the thread
};

}  // namespace adaptive
