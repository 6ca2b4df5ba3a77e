// State shared by the parts of a channel: its peer, whether it still works, and the description of
// its failure.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "common/channel.h"
#include "common/fork_guard.h"

namespace adaptive {

// All methods may be called from any thread. This object does not own the completions, because
// items in the completions may own this object.
class ChannelState {
 public:
  // `label` is put before the peer's name in failure texts, for example "TCP channel with ". May be
  // empty.
  ChannelState(const Session& session, int peer, const std::string& label = "");

  int peer() const noexcept { return peer_; }
  int rank() const noexcept { return rank_; }
  std::uint64_t job() const noexcept { return job_; }
  const std::string& peer_name() const noexcept { return peer_name_; }
  // Returns null if no thread can wait for arrivals any more.
  std::shared_ptr<Completions> completions() const noexcept { return completions_.lock(); }

  // Processes arrivals even if no thread waits for them.
  void drain_sources() const;
  // Runs `task` soon on the reactor's thread, or not at all if memory cannot be allocated.
  void post(Reactor::Task task) const noexcept;

  // Returns false in a forked child, which must not use its parent's threads, devices and peer.
  bool in_maker() const noexcept { return guard_.in_maker(); }
  // Throws Error in a child of a fork.
  void check_process() const;

  // Stops all sending. Only the reason of the first call is kept.
  void break_off(Failure::Kind kind, const std::string& finding) noexcept;
  // Breaks the channel and reports the failure once, with the last message from the peer.
  void fail(Failure::Kind kind, const std::string& finding) noexcept;
  // Ignores failures from now on, because this end is closing.
  void end() noexcept { reported_.store(true); }

  bool broken() const noexcept { return broken_.load(std::memory_order_acquire); }
  // Throws PeerLostError or Error if the channel is broken.
  void check() const {
    if (broken()) {
      throw_failure();
    }
  }

  // Fills in the fields that the channel sets in a message with one piece. Throws Error if the
  // channel is broken, the payload is above the limit, or the receiver would reject the message.
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
  // Computed once, because the caller's function must not run while a channel holds its locks.
  const std::string peer_name_;
  const std::string label_;
  const ForkGuard guard_;
  std::atomic<bool> broken_{false};
  std::atomic<bool> reported_{false};
  mutable std::mutex mutex_;
  Failure::Kind kind_ = Failure::Kind::kTransport;
  std::string text_;
  // Fields of the last received message. They may be a mixture of two messages, which is harmless
  // because they are only used in an error text.
  std::atomic<bool> any_received_{false};
  std::atomic<MessageKind> last_kind_{MessageKind::kData};
  std::atomic<std::int32_t> last_chunk_{0}, last_microbatch_{0};
  std::atomic<std::int64_t> last_step_{0};
};

}  // namespace adaptive
