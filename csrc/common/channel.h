// The sending end of a directed channel. A channel has one writer, keeps messages in order, and
// limits its memory by credits. The receiving end puts arrivals into the completions
// (completions.h).
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

// Objects that all channels of a process share.
struct Session {
  std::shared_ptr<Completions> completions;
  std::shared_ptr<Reactor> reactor;
  std::uint64_t job = 0;  // included in every message
  int rank = -1;
  unsigned local_processes = 0;  // busy processes on this node's CPUs
  // returns text like "rank 3 (stage 1, pid 77 on b)"; may be called from any thread
  std::function<std::string(int)> describe;
};

constexpr unsigned kMostSlots = 64;  // one bit per slot
constexpr std::size_t kLargestSlotBytes = std::size_t{1} << 40;
constexpr std::chrono::milliseconds kLeastSilence(10);
constexpr std::chrono::milliseconds kMostSilence(std::chrono::hours(24));

// Options that all kinds of channels share. The two ends may have different options, except with
// RDMA.
struct ChannelOptions {
  std::size_t slot_bytes = std::size_t{1} << 20;       // largest payload in one piece
  unsigned slots = 16;                                 // messages that the channel holds
  std::uint64_t limit_bytes = std::uint64_t{4} << 30;  // largest payload accepted
  // adds a checksum to messages that this end sends
  bool crc = false;
  // A peer is considered lost if no message or heartbeat arrives from it for this time.
  std::chrono::milliseconds silent_limit{60'000};
  // Maximum number of slots that are reserved and not yet sent. If a sender reserved all free
  // slots, it could not send an earlier message, for which the receiver may be waiting while it
  // holds the other slots.
  unsigned reservable = kMostSlots;
};

// Throws std::invalid_argument for options that are out of range.
void check_options(const ChannelOptions& options);

// Keeps the sender's memory alive if necessary. Most sends copy the data immediately and do not
// need it.
struct Keeper {
  // Returns an owner of the memory. Called at most once, by the thread that sends.
  std::shared_ptr<void> (*make)(void* context) = nullptr;
  void* context = nullptr;
};

// A block of the channel's own memory into which a payload is computed. Destroying this object
// without commit() returns the block to the channel. `memory` may be moved out and outlive
// commit(); the block is reused only after that lease is destroyed. The lease must not be destroyed
// before commit().
struct Reserved {
  Lease memory;
  std::uint64_t token = 0;
};

// Properties and choices of a channel by name, for logs and reports.
using Info = std::map<std::string, std::variant<bool, std::int64_t, double, std::string>>;

// Thread safety: one thread sends, reserves, flushes and closes. Any thread may destroy a Reserved.
class Sender {
 public:
  virtual ~Sender() = default;

  // Starts sending message.nbytes bytes at `data` and never waits for the peer. If the peer has no
  // free slot, the message is kept with `keeper`'s owner, and another thread sends it later. Fills
  // in magic, job, sequence and piece. Throws PeerLostError if the peer is known to be lost, and
  // Error if either end has closed the channel.
  virtual void send(Message message, const void* data, const Keeper& keeper) = 0;

  // Reserves nbytes in the channel's memory, aligned to 64 bytes. Returns an empty value if no slot
  // is free, if nbytes is larger than a slot, or if this transport has no memory of its own.
  virtual std::optional<Reserved> reserve(std::size_t nbytes) = 0;

  // Sends the payload in `reserved` without a copy. Throws Error if the memory belongs to another
  // channel.
  virtual void commit(Message message, Reserved reserved) = 0;

  // Like send(), for a payload that is computed by work already queued on `stream` (a CUstream).
  // The payload is either in host memory or, if it fits into a slot, in the memory of this
  // process's GPU. All later messages must also use this function. Throws Error if the channel does
  // not connect GPUs.
  virtual void send_after(Message message, const void* data, bool on_device, void* stream,
                          const Keeper& keeper);

  // Waits until all messages are in the peer's memory or have been passed to the network. The
  // caller's memory is then no longer needed. Returns false if the deadline passed.
  virtual bool flush(const Deadline& deadline) = 0;

  // Number of messages that flush() would wait for.
  virtual std::size_t pending() const noexcept = 0;

  // Tells the peer, after all pending messages, that no more messages follow. Does not wait.
  // Idempotent.
  virtual void close() noexcept = 0;

  // Includes "kind", "slot_bytes", "slots", "peer_closed" and properties of the transport.
  // "peer_closed" is true after the peer has closed its end. The messages that it sent before are
  // then in this process, but may not be in the completions yet.
  virtual Info info() const { return {}; }
};

inline void Sender::send_after(Message, const void*, bool, void*, const Keeper&) {
  throw Error("this channel does not connect GPUs: copy payloads to the host");
}

}  // namespace adaptive
