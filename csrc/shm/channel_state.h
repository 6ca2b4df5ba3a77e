// What the two directions of a channel have in common: whether it still works, and who was told.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "common/completions.h"
#include "common/error.h"

namespace adaptive::shm {

// All methods may be called from any thread. Does not own the completions: what waits there may own
// this.
class ChannelState {
 public:
  ChannelState(std::weak_ptr<Completions> completions, int peer, std::string peer_name)
      : completions_(std::move(completions)), peer_(peer), peer_name_(std::move(peer_name)) {}

  int peer() const noexcept { return peer_; }
  const std::string& peer_name() const noexcept { return peer_name_; }
  std::shared_ptr<Completions> completions() const noexcept { return completions_.lock(); }

  // From now on nothing is sent any more.
  void break_off(Failure::Kind kind, std::string text) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_.load(std::memory_order_relaxed)) {
      kind_ = kind;
      text_ = std::move(text);
      broken_.store(true, std::memory_order_release);
    }
  }

  // Breaks off and tells whoever waits, unless that was done.
  void fail(Failure::Kind kind, const std::string& text) noexcept {
    break_off(kind, text);
    const auto completions = completions_.lock();
    if (completions != nullptr && !reported_.exchange(true)) {
      try {
        completions->put(Failure{kind, peer_, text});
      } catch (...) {
        reported_.store(false);  // no memory now: whoever finds it next tells
      }
    }
  }

  bool broken() const noexcept { return broken_.load(std::memory_order_acquire); }

  // Throws PeerLostError or Error if it is broken off.
  void check() const {
    if (!broken()) {
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kind_ == Failure::Kind::kPeerLost) {
      throw PeerLostError(text_);
    }
    throw Error(text_);
  }

 private:
  const std::weak_ptr<Completions> completions_;
  const int peer_;
  const std::string peer_name_;
  std::atomic<bool> broken_{false};
  std::atomic<bool> reported_{false};
  mutable std::mutex mutex_;
  Failure::Kind kind_ = Failure::Kind::kTransport;
  std::string text_;
};

}  // namespace adaptive::shm
