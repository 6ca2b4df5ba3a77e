// The sending end of a directed channel: one writer, messages in order, memory bounded by credits.
// What the receiving end does is in completions.h: it puts arrivals there.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "common/completions.h"
#include "common/deadline.h"
#include "common/error.h"
#include "common/message.h"
#include "common/reactor.h"

namespace adaptive {

// What all channels of a process share.
struct Session {
  std::shared_ptr<Completions> completions;
  std::shared_ptr<Reactor> reactor;
  std::uint64_t job = 0;  // in every message
  int rank = -1;
  unsigned local_processes = 0;              // busy processes on this node's CPUs
  std::function<std::string(int)> describe;  // "rank 3 (stage 1, pid 77 on b)"; any thread
};

constexpr unsigned kMostSlots = 64;  // one bit each
constexpr std::size_t kLargestSlotBytes = std::size_t{1} << 40;
constexpr std::chrono::milliseconds kLeastSilence(10);
constexpr std::chrono::milliseconds kMostSilence(std::chrono::hours(24));

// What channels of all kinds can be set to; both ends of one may differ, but for RDMA.
struct ChannelOptions {
  std::size_t slot_bytes = std::size_t{1} << 20;       // largest payload in one piece
  unsigned slots = 16;                                 // messages that the channel holds
  std::uint64_t limit_bytes = std::uint64_t{4} << 30;  // largest payload accepted
  bool crc = false;                                    // of what this end sends
  // A peer is lost from which nothing, not even a heartbeat, came for so long.
  std::chrono::milliseconds silent_limit{60'000};
  // How many slots reserve() may have taken that the peer has not. A sender that takes them all
  // cannot send what comes first, while a receiver that holds the others waits for it.
  unsigned reservable = kMostSlots;
};

// Throws std::invalid_argument for what no channel can be set to.
void check_options(const ChannelOptions& options);

// How to keep the sender's memory alive, should that be necessary: most sends copy at once.
struct Keeper {
  // Returns an owner of the memory. Called at most once, by the thread that sends.
  std::shared_ptr<void> (*make)(void* context) = nullptr;
  void* context = nullptr;
};

// A part of the channel's own memory, to compute a payload into. Destroying it without commit()
// gives the part back. `memory` may be moved out of it and outlive commit(): the part is not used
// again before that lease is gone, too. It must not be gone before commit().
struct Reserved {
  Lease memory;
  std::uint64_t token = 0;
};

// What a channel found out and chose, by name, for logs and reports.
using Info = std::map<std::string, std::variant<bool, std::int64_t, double, std::string>>;

// Thread safety: one thread sends, reserves, flushes and closes; a Reserved may be destroyed by
// any.
class Sender {
 public:
  virtual ~Sender() = default;

  // Starts sending message.nbytes bytes at `data` and never waits for the peer: where it has no
  // room the message is kept, with `keeper`'s owner, and goes out from another thread. Fills in
  // magic, job, sequence and piece. Throws PeerLostError when the peer is known to be gone, Error
  // when it or this end has closed.
  virtual void send(Message message, const void* data, const Keeper& keeper) = 0;

  // Room for nbytes in the channel's memory, aligned to 64 bytes. Empty when there is none now, or
  // it is more than one slot holds, or this transport has no memory of its own.
  virtual std::optional<Reserved> reserve(std::size_t nbytes) = 0;

  // Sends what was computed into `reserved`, without a copy; a part of another channel is Error.
  virtual void commit(Message message, Reserved reserved) = 0;

  // As send(), for a payload that is not there before `stream` (a CUstream) has come so far: in the
  // memory of this process's GPU, at most a slot of it, or in the host's. Later messages have to
  // go this way, too. Throws Error where the channel has no way between GPUs.
  virtual void send_after(Message message, const void* data, bool on_device, void* stream,
                          const Keeper& keeper);

  // Waits until everything sent is in the peer's memory or in the network's hands and no memory of
  // the caller is needed any more. False when the deadline passed.
  virtual bool flush(const Deadline& deadline) = 0;

  // Messages that flush() would wait for.
  virtual std::size_t pending() const noexcept = 0;

  // Tells the peer that nothing follows, after what is pending. Does not wait; idempotent.
  virtual void close() noexcept = 0;

  // "kind", "slot_bytes", "slots" and what else there is to say.
  virtual Info info() const { return {}; }
};

inline void Sender::send_after(Message, const void*, bool, void*, const Keeper&) {
  throw Error("this channel has no way between GPUs: bring payloads to the host");
}

}  // namespace adaptive
