// What the two directions of a channel have in common: whether it still works, and what to say if
// it does not.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "common/channel.h"
#include "common/error.h"
#include "common/fork_guard.h"

namespace adaptive::rdma {

// All methods may be called from any thread.
class ChannelState {
 public:
  ChannelState(const Session& session, int peer)
      : session_(session),
        peer_(peer),
        // Asked once: it is code of others, which must not run under the locks of a channel.
        peer_name_(session.describe ? session.describe(peer) : "rank " + std::to_string(peer)) {}

  const Session& session() const noexcept { return session_; }
  int peer() const noexcept { return peer_; }
  const std::string& peer_name() const noexcept { return peer_name_; }
  // False in a child of a fork: what the device knows belongs to the parent there.
  bool in_maker() const noexcept { return fork_guard_.in_maker(); }

  // The first failure is put into the completions, others are its consequences.
  void fail(Failure::Kind kind, const std::string& finding) noexcept;
  // From now on nothing is a failure any more: this end is leaving.
  void end() noexcept { ended_.store(true); }

  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  // Throws what failed, as PeerLostError or Error.
  void check() const {
    if (failed()) {
      throw_failure();
    }
  }

  void note_received(const Message& message) noexcept;

 private:
  [[noreturn]] void throw_failure() const;
  std::string last_received() const;

  Session session_;
  int peer_;
  std::string peer_name_;
  ForkGuard fork_guard_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> ended_{false};
  mutable std::mutex mutex_;
  Failure::Kind kind_ = Failure::Kind::kTransport;
  std::string text_;
  bool any_received_ = false;
  Message last_;
};

}  // namespace adaptive::rdma
