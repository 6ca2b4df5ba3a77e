// The one background thread of a process: it watches descriptors (sockets of peers, their pidfds,
// credit signals, RDMA completion channels) and timers, so that messages move on and deaths are
// noticed while the process computes. It never holds the GIL.
//
// In a forked child of the process there is no such thread: add() and every() throw there, all else
// does nothing, so that a child that drops its copies of channels leaves those of its parent alone.
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
  // triggered). The descriptor stays the caller's, who removes it before closing it. A handler that
  // throws ends the process's use of that descriptor: it is removed, and the error goes to
  // on_error. Throws SystemError.
  void add(int fd, std::uint32_t events, Handler handler,
           std::function<void(const std::exception&)> on_error);
  void modify(int fd, std::uint32_t events);
  // After the return the handler does not run any more (unless called from within it).
  void remove(int fd) noexcept;

  // Runs `task` once on the reactor's thread, soon; not at all if the reactor ends before that.
  // What a task throws, the next add() or every() rethrows.
  void post(Task task);

  // Runs `task` every `period` until stopped; returns its number.
  std::uint64_t every(std::chrono::milliseconds period, Task task);
  void stop(std::uint64_t timer) noexcept;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;  // shared with the thread
};

}  // namespace adaptive
