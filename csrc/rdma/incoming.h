// The receiving end of a channel: the slots that the peer writes, and the return of free slots to
// the peer.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/assembler.h"
#include "common/channel_state.h"
#include "common/completions.h"
#include "rdma/channel.h"
#include "rdma/resources.h"
#include "rdma/wire.h"

namespace adaptive::rdma {

// This object lives until the last view of one of its slots is destroyed.
//
// The states of a slot:
//   free at the peer
//   written, with its number in the completion queue
//   leased by poll()
//   returned by any thread, with its bit in `returned_` flipped
//   free again after that word is written to the peer, as soon as the peer's Haste requires it
class Incoming : public std::enable_shared_from_this<Incoming> {
 public:
  Incoming(std::shared_ptr<ChannelState> channel_state, std::shared_ptr<Device> device,
           const RdmaOptions& options);

  // Adds the data that the peer needs.
  void describe(EndpointRecord* record) const;
  void connect(const EndpointRecord& peer, unsigned ack_timeout);

  // Must be called from one thread at a time. Returns whether there were arrivals.
  bool poll(Completions& into) noexcept;

  // Returns whether some but not all pieces of a message have arrived. Such a message must be
  // processed even while this process computes.
  bool assembling() const noexcept { return assembling_.load(std::memory_order_relaxed); }
  // Returns whether slots were returned without the peer being notified yet. Processing completions
  // sends these returns.
  bool stalled() const noexcept { return stalled_.load(std::memory_order_relaxed); }
  bool ended() const noexcept { return ended_.load(std::memory_order_acquire); }
  bool peer_gone() const noexcept { return gone_.load(std::memory_order_acquire); }

  Notify& notify() noexcept { return notify_; }
  ibv_cq* queue() const noexcept { return queue_.get(); }

  // Returns the memory of the slots.
  const Arena& slots() const noexcept { return arena_; }

  // Destroys the queue pairs. Leased slots stay readable.
  void stop() noexcept;

 private:
  // Upper bound for the number of writes with immediate that may arrive before an earlier one: one
  // per slot, a request for slots after each of these, and the final control word. The bound is a
  // power of two, so that the range of write numbers is a multiple of it.
  static constexpr std::size_t kWindow = 4 * kMostSlots;
  struct Place {
    bool filled = false;
    Immediate value;
  };

  bool take(Completions& into);
  void note(const ibv_wc& completion);
  void place(std::uint32_t bits);
  void deliver(const Immediate& value, Completions& into);
  void deliver_slot(unsigned slot, Completions& into);
  void hold(unsigned slot, bool urgent);
  void obey(Control word);
  void give_back(unsigned slot) noexcept;
  void settle() noexcept;
  bool credits_due() const noexcept;
  void write_credits() noexcept;
  void stall() noexcept;
  std::byte* slot_data(unsigned slot) const noexcept;

  std::shared_ptr<ChannelState> channel_state_;
  std::shared_ptr<Device> device_;
  const std::size_t slot_bytes_;
  const unsigned slots_;
  Arena arena_;
  CompletionQueue queue_;
  Notify notify_;
  std::vector<Receives> receives_;  // one entry per lane
  std::vector<QueuePair> pairs_;
  std::vector<std::uint32_t> first_psns_;
  std::uint32_t inline_bytes_ = 0;

  // Used only by the polling thread.
  std::array<Place, kWindow> window_{};
  std::uint32_t next_number_ = 0;
  std::uint64_t next_sequence_ = 0;
  Assembler assembler_;
  std::atomic<bool> assembling_{false};
  std::atomic<bool> ended_{false};
  std::atomic<bool> gone_{false};
  std::atomic<bool> stalled_{false};

  std::mutex mutex_;  // guards the following members
  bool stopped_ = false;
  Haste haste_ = Haste::kNone;
  std::uint64_t held_ = 0;             // slots that have not been returned
  std::atomic<unsigned> num_held_{0};  // number of these slots; arrivals refer to it
  std::uint64_t returned_ = 0;         // one bit per slot, flipped by each return
  unsigned num_unsaid_ = 0;            // returns that the peer does not know of yet
  std::uint64_t num_writes_ = 0;
  std::uint64_t num_writes_done_ = 0;
  std::uint64_t credit_address_ = 0;  // address at the peer
  std::uint32_t credit_key_ = 0;
};

}  // namespace adaptive::rdma
