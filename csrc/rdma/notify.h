// When a completion queue wakes the reactor.
#pragma once

#include <infiniband/verbs.h>

#include <mutex>

namespace adaptive::rdma {

// Of one completion queue. An event is for the next entry of its kind only and must be asked for
// again; who asks must look into the queue afterwards, since what came before makes no event.
class Notify {
 public:
  enum class Level { kNone, kSolicited, kAll };

  explicit Notify(ibv_cq* queue) noexcept : queue_(queue) {}

  // Asks for an event unless one of at least this level is due already. Returns whether that went
  // well: if not, the device has failed.
  bool ask(Level level) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ask_locked(level);
  }

  // To be called with each event taken: what it was asked for, then asks for `next`. Where somebody
  // asked for more in between that may be lost, so the caller rings the bell afterwards: whoever
  // sleeps looks again and asks again.
  Level taken(Level next) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Level before = level_;
    level_ = Level::kNone;
    ask_locked(next);
    return before;
  }

 private:
  bool ask_locked(Level level) noexcept {
    if (level <= level_) {
      return true;
    }
    level_ = level;
    return ::ibv_req_notify_cq(queue_, level == Level::kSolicited ? 1 : 0) == 0;
  }

  ibv_cq* queue_;
  std::mutex mutex_;
  Level level_ = Level::kNone;
};

}  // namespace adaptive::rdma
