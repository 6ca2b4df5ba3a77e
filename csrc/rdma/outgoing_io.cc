#ifdef MEGATRON_ADAPTIVE_RDMA

// The half of Outgoing that talks to the device; what callers and the reactor ask for is in
// outgoing.cc. All of it runs with the lock held.

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "common/error.h"
#include "rdma/outgoing.h"
#include "rdma/status.h"

namespace adaptive::rdma {

// ---- Slots

std::uint64_t Outgoing::free_slots() noexcept {
  const std::uint64_t gone = leases_gone_.exchange(0);
  leased_ &= ~gone;
  const std::uint64_t all =
      slots_ == kMostSlots ? ~std::uint64_t{0} : (std::uint64_t{1} << slots_) - 1;
  return all & ~(leased_ | committed_ | in_flight_);
}

bool Outgoing::has_room(bool needs_slot) {
  const OutLane& lane = next_lane();
  const bool fits = lane.num_posted - lane.num_done + writes_per_slot_ <= message_sends_;
  return fits && (!needs_slot || free_slots() != 0);
}

void Outgoing::take_credits() noexcept {
  const auto* word = reinterpret_cast<const std::atomic<std::uint64_t>*>(credit_page_.data());
  const std::uint64_t now = word->load(std::memory_order_acquire);
  const std::uint64_t returned = now ^ seen_credits_;
  if ((returned & ~in_flight_) != 0) {
    fail("it returned slots that it did not have");
  }
  seen_credits_ = now;
  in_flight_ &= ~returned;
}

// ---- Completions

// Does not throw: what it finds broken is for channel_state_->check() to tell.
void Outgoing::take_completions() noexcept {
  std::array<ibv_wc, 16> found;
  int count = 0;
  do {
    count = ::ibv_poll_cq(queue_.get(), static_cast<int>(found.size()), found.data());
    if (count < 0) {
      fail("ibv_poll_cq failed: the device has failed");
    }
    for (int i = 0; i < count; ++i) {
      note(found[static_cast<std::size_t>(i)]);
    }
  } while (count == static_cast<int>(found.size()));
  unfinished_.store(!all_done());
}

void Outgoing::note(const ibv_wc& completion) noexcept {
  const bool is_receive = (completion.wr_id & kReceiveId) != 0;
  if (completion.status != IBV_WC_SUCCESS) {
    if (!peer_left_) {
      channel_state_->fail(status_text(completion.status).kind,
                           describe_status(is_receive ? "receiving free slots" : "a write",
                                           completion.status, completion.vendor_err));
    }
    return;
  }
  if (is_receive) {
    if (!lanes_[completion.wr_id & ~kReceiveId].receives.used()) {
      fail("ibv_post_recv failed: the device has failed");
    }
    take_credits();
    return;
  }
  OutLane& lane = lanes_[completion.wr_id >> kLaneShift];
  lane.num_done = completion.wr_id & kCountMask;
}

bool Outgoing::all_done() const noexcept {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](const OutLane& lane) { return lane.num_done == lane.num_posted; });
}

// Makes everything sent so far end in a completion.
void Outgoing::fence() {
  for (OutLane& lane : lanes_) {
    if (lane.last_signalled != lane.num_posted) {
      post_empty(&lane, IBV_WR_RDMA_WRITE, 0);
    }
  }
}

// ---- Posting

// Sends what is possible; whether that was the rest.
bool Outgoing::post_rest(Waiting* waiting) {
  Message& message = waiting->message;
  const bool staged = waiting->slot >= 0;
  do {
    if (!has_room(!staged)) {
      take_completions();
      channel_state_->check();
      if (!has_room(!staged)) {
        return false;
      }
    }
    message.piece_bytes = std::min<std::uint64_t>(message.nbytes - message.offset, slot_bytes_);
    const auto slot = static_cast<unsigned>(staged ? waiting->slot : __builtin_ctzll(free_slots()));
    const std::uint64_t bit = std::uint64_t{1} << slot;
    committed_ &= ~bit;
    in_flight_ |= bit;
    if (!staged && message.piece_bytes != 0) {
      std::memcpy(slot_data(slot) + kHeaderBytes, waiting->data + message.offset,
                  message.piece_bytes);
    }
    post_piece(slot, message, message.piece_bytes != message.nbytes);
    message.offset += message.piece_bytes;
  } while (message.offset < message.nbytes);
  return true;
}

Immediate Outgoing::next_immediate(unsigned slot) noexcept {
  Immediate value;
  value.number = next_number_;
  value.slot = static_cast<std::uint8_t>(slot);
  value.urgent = static_cast<unsigned>(__builtin_popcountll(free_slots())) <= slots_ / 4;
  said_ = value.urgent ? std::max(said_, Haste::kUrgent) : Haste::kNone;
  next_number_ = (next_number_ + 1) & kNumberMask;
  return value;
}

void Outgoing::post_piece(unsigned slot, const Message& piece, bool to_reactor) {
  std::byte* const from = slot_data(slot);
  Message header = piece;
  if (crc_) {
    header.crc = crc32c(from + kHeaderBytes, piece.piece_bytes);
  }
  std::memcpy(from, &header, sizeof(header));

  OutLane& lane = next_lane();
  std::array<ibv_send_wr, kMostWrites> requests;
  std::array<ibv_sge, kMostWrites> parts;
  const std::size_t size = kHeaderBytes + piece.piece_bytes;
  std::size_t count = 0;
  for (std::size_t at = 0; at < size; at += write_bytes_, ++count) {
    parts[count] = {reinterpret_cast<std::uintptr_t>(from) + at,
                    static_cast<std::uint32_t>(std::min(write_bytes_, size - at)),
                    staging_.local_key()};
    ibv_send_wr& request = requests[count] = {};
    request.next = &requests[count + 1];
    request.sg_list = &parts[count];
    request.num_sge = 1;
    request.opcode = IBV_WR_RDMA_WRITE;
    request.wr.rdma.remote_addr = arena_address_ + slot * stride_of(slot_bytes_) + at;
    request.wr.rdma.rkey = lane.remote_key;
  }
  ibv_send_wr& last = requests[count - 1];
  last.next = nullptr;
  last.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  last.imm_data = htonl(pack(next_immediate(slot)));
  if (size <= inline_bytes_) {
    last.send_flags |= IBV_SEND_INLINE;
  }
  if (to_reactor) {
    last.send_flags |= IBV_SEND_SOLICITED;
  }
  const bool many = lane.num_posted + count - lane.last_signalled >= message_sends_ / 4;
  if (++messages_since_signal_ >= std::max(1U, slots_ / 4) || many) {
    messages_since_signal_ = 0;
    last.send_flags |= IBV_SEND_SIGNALED;
  }
  post(&lane, requests.data(), count);
}

void Outgoing::post_empty(OutLane* lane, ibv_wr_opcode opcode, std::uint32_t immediate) {
  ibv_send_wr request{};
  request.opcode = opcode;
  request.imm_data = htonl(immediate);
  request.send_flags = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;
  request.wr.rdma.remote_addr = arena_address_;
  request.wr.rdma.rkey = lane->remote_key;
  post(lane, &request, 1);
}

void Outgoing::post_control(Control word) {
  Immediate value;
  value.number = next_number_;
  value.control = true;
  value.slot = static_cast<std::uint8_t>(word);
  OutLane& lane = next_lane();
  next_number_ = (next_number_ + 1) & kNumberMask;
  post_empty(&lane, IBV_WR_RDMA_WRITE_WITH_IMM, pack(value));
}

// The peer may hold returns back, and nothing may come to it any more that makes it write them:
// reserved slots can make this end short of them without an urgent message, and with few under way.
void Outgoing::hurry() {
  const OutLane& lane = next_lane();
  const bool has_room = lane.num_posted - lane.num_done < message_sends_ + kSpareSends / 2;
  const auto in_flight = static_cast<unsigned>(__builtin_popcountll(in_flight_));
  const Haste needed = in_flight > slots_ / 2 ? Haste::kUrgent : Haste::kAtOnce;
  if (said_ < needed && in_flight != 0 && has_room) {
    said_ = Haste::kAtOnce;
    post_control(Control::kHurry);
  }
}

void Outgoing::post(OutLane* lane, ibv_send_wr* first, std::uint64_t count) {
  const auto index = static_cast<std::uint64_t>(lane - lanes_.data());
  for (ibv_send_wr* request = first; request != nullptr; request = request->next) {
    request->wr_id = index << kLaneShift | (++lane->num_posted & kCountMask);
    if ((request->send_flags & IBV_SEND_SIGNALED) != 0) {
      lane->last_signalled = lane->num_posted;
    }
  }
  unfinished_.store(true, std::memory_order_relaxed);
  ibv_send_wr* refused = nullptr;
  const int code = ::ibv_post_send(lane->pair.get(), first, &refused);
  if (code != 0) {
    const SystemError error("ibv_post_send", std::to_string(count) + " writes", code);
    channel_state_->fail(Failure::Kind::kTransport, error.what());
    channel_state_->check();
  }
}

}  // namespace adaptive::rdma

#endif
