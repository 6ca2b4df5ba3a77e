// What the parts of a channel have in common: who is at the other end, whether the channel still
// works, and what to say if it does not.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "common/channel.h"
#include "common/fork_guard.h"

namespace adaptive {

// All methods may be called from any thread. Does not own the completions: what waits there may own
// this.
class ChannelState {
 public:
  // `label` stands before the texts of failures and ends with the peer's name: "TCP channel with ";
  // nothing where it is empty.
  ChannelState(const Session& session, int peer, const std::string& label = "");

  int peer() const noexcept { return peer_; }
  int rank() const noexcept { return rank_; }
  std::uint64_t job() const noexcept { return job_; }
  const std::string& peer_name() const noexcept { return peer_name_; }
  // Empty once nobody can wait for arrivals any more.
  std::shared_ptr<Completions> completions() const noexcept { return completions_.lock(); }

  // Lets what has arrived move on, whoever waits for it.
  void drain_sources() const;
  // Runs `task` on the reactor's thread, soon; or not at all, where there is no memory for it.
  void post(Reactor::Task task) const noexcept;

  // False in a child of a fork: threads, devices and the peer belong to the parent.
  bool in_maker() const noexcept { return guard_.in_maker(); }
  // Throws Error in a child of a fork.
  void check_process() const;

  // From now on nothing is sent any more. The first reason stays.
  void break_off(Failure::Kind kind, const std::string& finding) noexcept;
  // Breaks off and tells whoever waits, once, with the last message from the peer.
  void fail(Failure::Kind kind, const std::string& finding) noexcept;
  // From now on nothing is a failure any more: this end is leaving.
  void end() noexcept { reported_.store(true); }

  bool broken() const noexcept { return broken_.load(std::memory_order_acquire); }
  // Throws PeerLostError or Error if it is broken off.
  void check() const {
    if (broken()) {
      throw_failure();
    }
  }

  // Fills in what a channel adds to a message, as one piece. Throws Error where it is broken off,
  // for a payload above the limit and for what the receiver would refuse.
  void prepare(Message& message, std::uint64_t sequence, std::uint64_t limit_bytes, bool crc) const;

  void note_received(const Message& message) noexcept;

 private:
  [[noreturn]] void throw_failure() const;
  std::string text_of(const std::string& finding) const;

  const std::weak_ptr<Completions> completions_;
  const std::weak_ptr<Reactor> reactor_;
  const int rank_;
  const std::uint64_t job_;
  const int peer_;
  // Asked once: it is code of others, which must not run under the locks of a channel.
  const std::string peer_name_;
  const std::string label_;
  const ForkGuard guard_;
  std::atomic<bool> broken_{false};
  std::atomic<bool> reported_{false};
  mutable std::mutex mutex_;
  Failure::Kind kind_ = Failure::Kind::kTransport;
  std::string text_;
  // Of the message received last, one by one: a mixture of two would only be words.
  std::atomic<bool> any_received_{false};
  std::atomic<MessageKind> last_kind_{MessageKind::kData};
  std::atomic<std::int32_t> last_chunk_{0}, last_microbatch_{0};
  std::atomic<std::int64_t> last_step_{0};
};

}  // namespace adaptive
