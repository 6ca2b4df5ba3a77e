#ifdef MEGATRON_ADAPTIVE_RDMA

#include "rdma/incoming.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "common/error.h"
#include "rdma/status.h"

namespace adaptive::rdma {
namespace {

constexpr unsigned kSignalEvery = 8;       // writes of credits
constexpr std::size_t kCreditWords = 512;  // if credits cannot be sent inline

// Returns how many writes of credits must fit into the queue pair. Each slot may have been returned
// in a separate write that has not been acknowledged yet.
std::uint32_t credit_writes(unsigned slots) {
  return slots + 2 * kSignalEvery;
}

// Maximum number of writes with immediate that the peer may have in flight: one per slot, a request
// for slots after each of these, and the final control word.
unsigned most_writes(unsigned slots) {
  return 2 * slots + 2;
}

}  // namespace

Incoming::Incoming(std::shared_ptr<ChannelState> channel_state, std::shared_ptr<Device> device,
                   const RdmaOptions& options)
    : channel_state_(std::move(channel_state)),
      device_(std::move(device)),
      slot_bytes_(options.slot_bytes),
      slots_(options.slots),
      arena_(device_, slots_ * stride_of(slot_bytes_) + kCreditWords * sizeof(std::uint64_t), true),
      queue_(create_completion_queue(
          *device_,
          static_cast<int>(options.num_qps * 2 * most_writes(slots_) + credit_writes(slots_)))),
      notify_(queue_.get()),
      assembler_(options.limit_bytes) {
  for (unsigned lane = 0; lane < options.num_qps; ++lane) {
    receives_.emplace_back(most_writes(slots_), kReceiveId + lane);
    inline_bytes_ = sizeof(std::uint64_t);
    pairs_.push_back(create_queue_pair(
        *device_, queue_.get(), {credit_writes(slots_), receives_.back().depth()}, &inline_bytes_));
    first_psns_.push_back(random_psn());
  }
}

void Incoming::describe(EndpointRecord* record) const {
  record->slots = slots_;
  record->slot_bytes = slot_bytes_;
  record->stride_bytes = stride_of(slot_bytes_);
  record->arena_address = arena_.address();
  for (std::size_t i = 0; i < pairs_.size(); ++i) {
    Lane& lane = record->lanes.at(i);
    lane.qp_in = pairs_[i]->qp_num;
    lane.psn_in = first_psns_[i];
    lane.arena_key = arena_.remote_key();
  }
}

void Incoming::connect(const EndpointRecord& peer, unsigned ack_timeout) {
  credit_address_ = peer.credit_address;
  credit_key_ = peer.lanes.at(0).credit_key;
  for (std::size_t i = 0; i < pairs_.size(); ++i) {
    const Lane& lane = peer.lanes.at(i);
    receives_[i].start(pairs_[i].get());
    rdma::connect(pairs_[i].get(), *device_, {lane.qp_out, lane.psn_out, lane}, first_psns_[i],
                  ack_timeout);
  }
}

std::byte* Incoming::slot_data(unsigned slot) const noexcept {
  return arena_.data() + slot * stride_of(slot_bytes_);
}

bool Incoming::poll(Completions& into) noexcept {
  try {
    return take(into);
  } catch (const std::exception& error) {
    channel_state_->fail(Failure::Kind::kTransport, error.what());
    return true;
  }
}

bool Incoming::take(Completions& into) {
  std::array<ibv_wc, 16> found;
  bool any = false;
  for (int count = static_cast<int>(found.size()); count == static_cast<int>(found.size());) {
    count = ::ibv_poll_cq(queue_.get(), static_cast<int>(found.size()), found.data());
    if (count < 0) {
      throw Error("ibv_poll_cq failed: the device has failed");
    }
    if (count == 0) {
      break;
    }
    for (int i = 0; i < count; ++i) {
      note(found[static_cast<std::size_t>(i)]);
    }
    for (Place* next = &window_[next_number_ % kWindow]; next->filled;
         next = &window_[next_number_ % kWindow]) {
      next->filled = false;
      next_number_ = (next_number_ + 1) & kNumberMask;
      deliver(next->value, into);
      any = true;
    }
    settle();
  }
  return any;
}

void Incoming::note(const ibv_wc& completion) {
  const bool is_receive = (completion.wr_id & kReceiveId) != 0;
  if (completion.status != IBV_WC_SUCCESS) {
    // A peer that has sent its last message may exit without waiting for its returned slots.
    if (!ended()) {
      channel_state_->fail(status_text(completion.status).kind,
                           describe_status(is_receive ? "receiving" : "returning slots",
                                           completion.status, completion.vendor_err));
    }
    return;
  }
  if (!is_receive) {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_writes_done_ = completion.wr_id;
    return;
  }
  if (completion.opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
    throw Error("it sent operations other than writes with immediate");
  }
  const std::size_t lane = completion.wr_id & ~kReceiveId;
  if (!receives_.at(lane).used()) {
    throw Error("ibv_post_recv failed: the device has failed");
  }
  place(ntohl(completion.imm_data));
}

void Incoming::place(std::uint32_t bits) {
  const Immediate value = unpack(bits);
  const std::uint32_t ahead = (value.number - next_number_) & kNumberMask;
  Place& place = window_[value.number % kWindow];
  if (ahead >= most_writes(slots_) || place.filled) {
    throw Error("write " + std::to_string(value.number) + " came where " +
                std::to_string(next_number_) + " was expected");
  }
  place = {true, value};
}

void Incoming::deliver(const Immediate& value, Completions& into) {
  if (!value.control) {
    hold(value.slot, value.urgent);
    deliver_slot(value.slot, into);
    return;
  }
  obey(static_cast<Control>(value.slot));
}

void Incoming::obey(Control word) {
  switch (word) {
    case Control::kGone:
      gone_.store(true, std::memory_order_release);
      if (!ended()) {
        channel_state_->fail(Failure::Kind::kPeerLost, "it left without closing the channel");
      }
      return;
    case Control::kHurry: {
      const std::lock_guard<std::mutex> lock(mutex_);
      haste_ = Haste::kAtOnce;  // settle() is called afterwards
      return;
    }
  }
  throw Error("it sent the unknown control word " + std::to_string(static_cast<int>(word)));
}

void Incoming::hold(unsigned slot, bool urgent) {
  const std::uint64_t bit = std::uint64_t{1} << slot;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (slot >= slots_ || (held_ & bit) != 0) {
    throw Error("slot " + std::to_string(slot) + " of " + std::to_string(slots_) +
                " was written while it did not belong to the peer");
  }
  held_ |= bit;
  num_held_.fetch_add(1, std::memory_order_relaxed);
  haste_ = urgent ? std::max(haste_, Haste::kUrgent) : Haste::kNone;
}

void Incoming::deliver_slot(unsigned slot, Completions& into) {
  std::byte* const data = slot_data(slot);
  Message message;
  // The header is copied first, because the peer could change the original at any time.
  std::memcpy(&message, data, sizeof(message));
  Lease lease(
      data + kHeaderBytes, message.piece_bytes, shared_from_this(),
      [](void* owner, std::uint64_t token) noexcept {
        static_cast<Incoming*>(owner)->give_back(static_cast<unsigned>(token));
      },
      slot);
  check_message(message, channel_state_->job(), slot_bytes_, channel_state_->peer());
  if (message.sequence != next_sequence_ || ended()) {
    throw Error("message " + std::to_string(message.sequence) + " came where " +
                (ended() ? "nothing" : std::to_string(next_sequence_)) + " was expected");
  }
  if (message.has_crc != 0 && crc32c(lease.data(), message.piece_bytes) != message.crc) {
    throw Error("the payload of " + adaptive::describe(message) + " does not have its checksum");
  }
  if (message.kind == MessageKind::kEnd) {
    ended_.store(true, std::memory_order_release);
    return;
  }
  Arrival arrival;
  if (message.piece_bytes == message.nbytes && !assembler_.busy()) {
    arrival = Arrival{channel_state_->peer(), message, std::move(lease), slots_, &num_held_};
  } else {
    auto whole = assembler_.add(message, lease.data(), channel_state_->peer());
    assembling_.store(assembler_.busy(), std::memory_order_relaxed);
    if (!whole) {
      return;
    }
    arrival = std::move(*whole);
  }
  ++next_sequence_;
  channel_state_->note_received(message);
  into.found(std::move(arrival));
}

void Incoming::give_back(unsigned slot) noexcept {
  if (!channel_state_->in_maker()) {
    return;
  }
  const std::uint64_t bit = std::uint64_t{1} << slot;
  const std::lock_guard<std::mutex> lock(mutex_);
  held_ &= ~bit;
  num_held_.fetch_sub(1, std::memory_order_relaxed);
  returned_ ^= bit;
  ++num_unsaid_;
  if (credits_due()) {
    write_credits();
  }
}

// Sends credits that could not be sent earlier, because this end did not know yet that the peer
// needed slots, or because the queue pair was full.
void Incoming::settle() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (credits_due()) {
    write_credits();
  }
}

bool Incoming::credits_due() const noexcept {
  if (num_unsaid_ == 0 || haste_ == Haste::kAtOnce || num_unsaid_ >= slots_ / 2) {
    return num_unsaid_ != 0;
  }
  const unsigned under_way = slots_ - num_unsaid_ - num_held_.load(std::memory_order_relaxed);
  return haste_ == Haste::kUrgent && (num_unsaid_ >= slots_ / 4 || under_way <= slots_ / 2);
}

void Incoming::write_credits() noexcept {
  if (stopped_ || ended() || channel_state_->broken()) {
    return;  // credits are no longer needed
  }
  if (num_writes_ - num_writes_done_ >= credit_writes(slots_)) {
    stall();
    return;
  }
  stalled_.store(false, std::memory_order_relaxed);
  std::byte* const word = arena_.data() + slots_ * stride_of(slot_bytes_) +
                          num_writes_ % kCreditWords * sizeof(std::uint64_t);
  std::memcpy(word, &returned_, sizeof(returned_));
  ibv_sge part{};
  part.addr = reinterpret_cast<std::uintptr_t>(word);
  part.length = sizeof(returned_);
  part.lkey = arena_.local_key();
  ibv_send_wr request{};
  request.wr_id = ++num_writes_;
  request.sg_list = &part;
  request.num_sge = 1;
  request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  request.imm_data = htonl(static_cast<std::uint32_t>(num_writes_));
  request.send_flags = inline_bytes_ >= sizeof(returned_) ? IBV_SEND_INLINE : 0;
  if (num_writes_ % kSignalEvery == 0) {
    request.send_flags |= IBV_SEND_SIGNALED;
  }
  request.wr.rdma.remote_addr = credit_address_;
  request.wr.rdma.rkey = credit_key_;
  ibv_send_wr* refused = nullptr;
  // If the device refuses the write, it has failed. A completion or the next write reports the
  // details.
  if (::ibv_post_send(pairs_.front().get(), &request, &refused) == 0) {
    num_unsaid_ = 0;
  } else {
    --num_writes_;
  }
}

// Postpones the credits until earlier writes have been acknowledged. The returned slots stay
// recorded, so that settle() sends them.
void Incoming::stall() noexcept {
  if (stalled_.exchange(true)) {
    return;
  }
  notify_.ask(Notify::Level::kAll);
  // Process the messages that arrived before this request, because they cause no event.
  channel_state_->post([weak = weak_from_this()] {
    if (const auto self = weak.lock()) {
      self->channel_state_->drain_sources();
    }
  });
}

void Incoming::stop() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  pairs_.clear();
}

}  // namespace adaptive::rdma

#endif
