// The sending end of a channel: a staging arena with the peer's layout, and waiting messages.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/channel_state.h"
#include "rdma/channel.h"
#include "rdma/resources.h"
#include "rdma/wire.h"

namespace adaptive::rdma {

// Slot i of the staging arena is written to slot i of the peer, and is free again when the peer has
// returned it. By then the write has finished, so the network card does not need the slot any more.
class Outgoing : public std::enable_shared_from_this<Outgoing> {
 public:
  Outgoing(std::shared_ptr<ChannelState> channel_state, std::shared_ptr<Device> device,
           const RdmaOptions& options);

  void describe(EndpointRecord* record) const;
  void connect(const EndpointRecord& peer, unsigned ack_timeout);

  // See Sender.
  void send(Message message, const void* data, const Keeper& keeper);
  std::optional<Reserved> reserve(std::size_t nbytes);
  void commit(Message message, const Reserved& reserved);
  bool flush(const Deadline& deadline);
  std::size_t pending() const noexcept { return num_waiting_.load(std::memory_order_relaxed); }
  void close() noexcept;

  // Processes completions and sends waiting messages. May be called from any thread.
  void advance() noexcept;
  // Must be called after an event of this end's queue was taken.
  void on_event() noexcept;
  // Must be called before the process sleeps, so that failures wake it.
  void arm() noexcept;

  // Drops waiting messages without an error, because the peer does not receive any more.
  void peer_left() noexcept;
  // Tells the peer that this end has finished, and waits briefly for the acknowledgement.
  void leave() noexcept;
  // Whether this end is closed and the peer has all messages.
  bool finished() noexcept;
  // Destroys the queue pairs.
  void stop() noexcept;

  ibv_cq* queue() const noexcept { return queue_.get(); }
  Info info() const;

 private:
  static constexpr std::size_t kMostWrites = 64;    // per slot
  static constexpr std::uint64_t kSpareSends = 16;  // room for sends that are not messages
  // bit position of the lane in the id of a send; the lower bits are a count
  static constexpr unsigned kLaneShift = 48;
  static constexpr std::uint64_t kCountMask = (std::uint64_t{1} << kLaneShift) - 1;

  struct OutLane {
    QueuePair pair;
    Receives receives;
    std::uint32_t first_psn = 0;
    std::uint32_t remote_key = 0;
    std::uint64_t num_posted = 0;
    std::uint64_t num_done = 0;
    std::uint64_t last_signalled = 0;
  };
  struct Waiting {
    Message message;
    const std::byte* data = nullptr;  // null if `slot` already holds the payload
    int slot = -1;
    std::shared_ptr<void> owner;
  };
  // must be destroyed without the lock, because owners may run the caller's code
  using Finished = std::vector<Waiting>;

  void enqueue(Waiting waiting, const Keeper* keeper);
  bool post_rest(Waiting* waiting);
  void post_piece(unsigned slot, const Message& piece, bool to_reactor);
  void post(OutLane* lane, ibv_send_wr* first, std::uint64_t count);
  void post_empty(OutLane* lane, ibv_wr_opcode opcode, std::uint32_t immediate);
  void move_on(Finished* finished);
  void take_completions() noexcept;
  void note(const ibv_wc& completion) noexcept;
  void take_credits() noexcept;
  bool has_room(bool needs_slot);
  std::uint64_t free_slots() noexcept;
  bool all_done() const noexcept;
  void fence();
  OutLane& next_lane() noexcept { return lanes_[next_number_ % lanes_.size()]; }
  std::byte* slot_data(unsigned slot) const noexcept;
  Immediate next_immediate(unsigned slot) noexcept;
  void post_control(Control word);
  void hurry();
  void give_up(unsigned slot) noexcept;
  void fail(const char* finding) noexcept;
  void check_open() const;

  std::shared_ptr<ChannelState> channel_state_;
  std::shared_ptr<Device> device_;
  const std::size_t slot_bytes_;
  const unsigned slots_;
  const unsigned reservable_;
  const std::uint64_t limit_bytes_;
  const bool crc_;
  const std::size_t write_bytes_;
  const std::uint64_t writes_per_slot_;
  const std::uint64_t message_sends_;  // message writes that fit into a queue pair
  Arena staging_;
  Arena credit_page_;
  CompletionQueue queue_;
  Notify notify_;
  std::vector<OutLane> lanes_;
  std::uint32_t inline_bytes_ = 0;
  std::uint64_t arena_address_ = 0;  // address at the peer
  std::atomic<std::uint64_t> num_waiting_{0};
  std::atomic<std::uint64_t> leases_gone_{0};  // slots whose reserved memory is no longer held
  std::atomic<bool> unfinished_{false};        // writes are in flight

  mutable std::mutex mutex_;  // guards the following members
  std::condition_variable moved_;
  std::deque<Waiting> waiting_;
  bool closed_ = false;
  bool peer_left_ = false;
  bool stopped_ = false;
  std::uint64_t leased_ = 0;     // reserved slots whose memory the caller still holds
  std::uint64_t committed_ = 0;  // reserved slots that were passed to commit()
  std::uint64_t in_flight_ = 0;  // slots written to the peer and not returned yet
  std::uint64_t seen_credits_ = 0;
  std::uint32_t next_number_ = 0;
  std::uint64_t next_sequence_ = 0;
  unsigned messages_since_signal_ = 0;
  Haste said_ = Haste::kNone;
};

}  // namespace adaptive::rdma
