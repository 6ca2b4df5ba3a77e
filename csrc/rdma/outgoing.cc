#ifdef MEGATRON_ADAPTIVE_RDMA

#include "rdma/outgoing.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "common/error.h"
#include "rdma/status.h"

namespace adaptive::rdma {
namespace {

using std::chrono::milliseconds;

constexpr std::uint32_t kWishedInline = 256;
constexpr std::uint32_t kMostSends = 4096;
constexpr std::size_t kPageBytes = 4096;
constexpr auto kLeaveWait = milliseconds(300);
constexpr auto kLookAgain = milliseconds(20);

// Desired size of a write. A long message is split into several writes, so that after a lost packet
// only one of them is repeated.
constexpr std::size_t kWishedWriteBytes = std::size_t{32} << 10;

std::size_t choose_write_bytes(const RdmaOptions& options, std::size_t most_writes) {
  const std::size_t least = (stride_of(options.slot_bytes) + most_writes - 1) / most_writes;
  return round_up(std::max(kWishedWriteBytes, least), kPageBytes);
}

// Returns the maximum number of credit writes that may have arrived without having been processed.
// Each returns at least one slot, and slots are reused only after the queue has been read.
unsigned credit_receives(unsigned slots) {
  return 2 * slots;
}

}  // namespace

Outgoing::Outgoing(std::shared_ptr<ChannelState> channel_state, std::shared_ptr<Device> device,
                   const RdmaOptions& options)
    : channel_state_(std::move(channel_state)),
      device_(std::move(device)),
      slot_bytes_(options.slot_bytes),
      slots_(options.slots),
      reservable_(options.reservable),
      limit_bytes_(options.limit_bytes),
      crc_(options.crc),
      write_bytes_(choose_write_bytes(options, kMostWrites)),
      writes_per_slot_((stride_of(slot_bytes_) + write_bytes_ - 1) / write_bytes_),
      message_sends_(std::min<std::uint64_t>(kMostSends, writes_per_slot_ * slots_)),
      staging_(device_, slots_ * stride_of(slot_bytes_), false),
      credit_page_(device_, kPageBytes, true),
      queue_(create_completion_queue(
          *device_, static_cast<int>(options.num_qps * (message_sends_ + kSpareSends +
                                                        2 * credit_receives(slots_))))),
      notify_(queue_.get()) {
  new (credit_page_.data()) std::atomic<std::uint64_t>(0);
  for (unsigned index = 0; index < options.num_qps; ++index) {
    inline_bytes_ = kWishedInline;
    Receives receives(credit_receives(slots_), kReceiveId + index);
    const auto sends = static_cast<std::uint32_t>(message_sends_ + kSpareSends);
    QueuePair pair =
        create_queue_pair(*device_, queue_.get(), {sends, receives.depth()}, &inline_bytes_);
    lanes_.push_back({std::move(pair), receives, random_psn()});
  }
}

void Outgoing::describe(EndpointRecord* record) const {
  record->job = channel_state_->job();
  record->credit_address = credit_page_.address();
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    Lane& lane = record->lanes.at(i);
    lane.qp_out = lanes_[i].pair->qp_num;
    lane.psn_out = lanes_[i].first_psn;
    lane.credit_key = credit_page_.remote_key();
  }
}

void Outgoing::connect(const EndpointRecord& peer, unsigned ack_timeout) {
  const std::lock_guard<std::mutex> lock(mutex_);
  arena_address_ = peer.arena_address;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    OutLane& lane = lanes_[i];
    const Lane& remote = peer.lanes.at(i);
    lane.remote_key = remote.arena_key;
    lane.receives.start(lane.pair.get());
    rdma::connect(lane.pair.get(), *device_, {remote.qp_in, remote.psn_in, remote}, lane.first_psn,
                  ack_timeout);
  }
}

std::byte* Outgoing::slot_data(unsigned slot) const noexcept {
  return staging_.data() + slot * stride_of(slot_bytes_);
}

void Outgoing::check_open() const {
  channel_state_->check();
  if (closed_ || peer_left_ || stopped_) {
    throw Error("the RDMA channel to " + channel_state_->peer_name() + " was closed by " +
                (closed_ || stopped_ ? "this end" : "the peer"));
  }
}

void Outgoing::send(Message message, const void* data, const Keeper& keeper) {
  Waiting waiting;
  waiting.message = message;
  waiting.data = static_cast<const std::byte*>(data);
  enqueue(std::move(waiting), &keeper);
}

void Outgoing::commit(Message message, const Reserved& reserved) {
  const std::size_t stride = stride_of(slot_bytes_);
  const std::uint64_t offset = reserved.token - kHeaderBytes - staging_.address();
  const std::uint64_t slot = offset / stride;
  const std::uint64_t bit = std::uint64_t{1} << (slot % kMostSlots);
  Waiting waiting;
  waiting.message = message;
  waiting.slot = static_cast<int>(slot);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (offset % stride != 0 || slot >= slots_ || (leased_ & bit) == 0 || (committed_ & bit) != 0 ||
        message.nbytes > slot_bytes_) {
      throw Error("the committed memory was not reserved from the channel to " +
                  channel_state_->peer_name() + ", or was committed before");
    }
    check_open();
    committed_ |= bit;
  }
  enqueue(std::move(waiting), nullptr);
}

void Outgoing::enqueue(Waiting waiting, const Keeper* keeper) {
  Finished finished;
  const std::lock_guard<std::mutex> lock(mutex_);
  check_open();
  channel_state_->prepare(waiting.message, next_sequence_, limit_bytes_, crc_);
  ++next_sequence_;
  take_completions();
  channel_state_->check();
  if (!waiting_.empty()) {
    move_on(&finished);
  }
  if (waiting_.empty() && post_rest(&waiting)) {
    return;
  }
  if (waiting.slot < 0 && waiting.message.nbytes != 0) {
    if (keeper != nullptr && keeper->make != nullptr) {
      waiting.owner = keeper->make(keeper->context);
    } else {
      auto copy = std::make_shared<std::vector<std::byte>>(waiting.data,
                                                           waiting.data + waiting.message.nbytes);
      waiting.data = copy->data();
      waiting.owner = std::move(copy);
    }
  }
  waiting_.push_back(std::move(waiting));
  num_waiting_.store(waiting_.size());
  // From now on, credits and dropped reservations wake the reactor. Earlier ones do not, so check
  // once more.
  notify_.ask(Notify::Level::kAll);
  take_completions();
  channel_state_->check();
  move_on(&finished);
  if (!waiting_.empty()) {
    hurry();
  }
}

std::optional<Reserved> Outgoing::reserve(std::size_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_open();
  if (nbytes > slot_bytes_ || !waiting_.empty()) {
    return std::nullopt;
  }
  std::uint64_t free = free_slots();
  if (static_cast<unsigned>(__builtin_popcountll(leased_)) >= reservable_) {
    return std::nullopt;
  }
  if (free == 0) {
    take_completions();
    channel_state_->check();
    free = free_slots();
  }
  if (free == 0) {
    hurry();
    return std::nullopt;
  }
  const auto slot = static_cast<unsigned>(__builtin_ctzll(free));
  leased_ |= std::uint64_t{1} << slot;
  std::byte* const memory = slot_data(slot) + kHeaderBytes;
  Reserved reserved;
  reserved.memory = Lease(
      memory, nbytes, shared_from_this(),
      [](void* owner, std::uint64_t token) noexcept {
        static_cast<Outgoing*>(owner)->give_up(static_cast<unsigned>(token));
      },
      slot);
  reserved.token = reinterpret_cast<std::uintptr_t>(memory);
  return reserved;
}

// May be called by any thread, even by one that holds locks. Therefore, only records the slot.
void Outgoing::give_up(unsigned slot) noexcept {
  leases_gone_.fetch_or(std::uint64_t{1} << slot);
  if (num_waiting_.load() == 0 || !channel_state_->in_maker()) {
    return;
  }
  channel_state_->post([weak = weak_from_this()] {
    if (const auto self = weak.lock()) {
      self->advance();
    }
  });
}

void Outgoing::close() noexcept {
  try {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (closed_ || peer_left_ || stopped_ || channel_state_->broken()) {
        closed_ = true;
        return;
      }
    }
    Waiting end;
    end.message.kind = MessageKind::kEnd;
    end.message.dtype = ElementType::kUInt8;
    end.message.dimensions = 1;  // an empty payload
    enqueue(std::move(end), nullptr);
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

// ---- Waiting messages

void Outgoing::move_on(Finished* finished) {
  while (!waiting_.empty()) {
    finished->emplace_back();  // may throw, so it must precede the send
    if (!post_rest(&waiting_.front())) {
      finished->pop_back();
      break;
    }
    finished->back() = std::move(waiting_.front());
    waiting_.pop_front();
  }
  num_waiting_.store(waiting_.size());
}

void Outgoing::fail(const char* finding) noexcept {
  channel_state_->fail(Failure::Kind::kTransport, finding);
}

void Outgoing::advance() noexcept {
  Finished finished;
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) {
      return;
    }
    take_completions();
    if (channel_state_->broken() || peer_left_) {
      std::move(waiting_.begin(), waiting_.end(), std::back_inserter(finished));
      waiting_.clear();
    }
    move_on(&finished);
  } catch (const std::exception& error) {
    fail(error.what());
  }
  moved_.notify_all();
}

void Outgoing::on_event() noexcept {
  notify_.taken(Notify::Level::kNone);
  advance();
  if (unfinished_.load() || num_waiting_.load() != 0) {
    notify_.ask(Notify::Level::kAll);
    advance();
  }
}

void Outgoing::arm() noexcept {
  if (unfinished_.load()) {
    notify_.ask(Notify::Level::kAll);
    advance();
  }
}

bool Outgoing::flush(const Deadline& deadline) {
  for (;;) {
    advance();
    {
      std::unique_lock<std::mutex> lock(mutex_);
      channel_state_->check();
      if (peer_left_) {
        return true;
      }
      if (stopped_) {
        return waiting_.empty();
      }
      if (waiting_.empty()) {
        fence();
        take_completions();
        channel_state_->check();
        if (all_done()) {
          return true;
        }
      }
      notify_.ask(Notify::Level::kAll);
      take_completions();
      if (deadline.expired()) {
        return false;
      }
      if (!(waiting_.empty() && all_done())) {
        const auto wait = std::min(kLookAgain, milliseconds(deadline.remaining_ms()));
        moved_.wait_for(lock, wait);
      }
    }
    // The peer may be waiting until its own messages are processed, or may have closed the channel.
    channel_state_->drain_sources();
  }
}

Info Outgoing::info() const {
  Info info;
  info["slot_bytes"] = static_cast<std::int64_t>(slot_bytes_);
  info["slots"] = static_cast<std::int64_t>(slots_);
  info["num_qps"] = static_cast<std::int64_t>(lanes_.size());
  info["inline_bytes"] = static_cast<std::int64_t>(inline_bytes_);
  info["write_bytes"] = static_cast<std::int64_t>(write_bytes_);
  info["send_address"] = static_cast<std::int64_t>(staging_.address());
  info["send_bytes"] = static_cast<std::int64_t>(staging_.size_bytes());
  return info;
}

// ---- Closing

void Outgoing::peer_left() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    peer_left_ = true;
  }
  advance();
}

bool Outgoing::finished() noexcept {
  advance();
  const std::lock_guard<std::mutex> lock(mutex_);
  return closed_ && waiting_.empty() && (all_done() || in_flight_ == 0);
}

void Outgoing::leave() noexcept {
  try {
    const Deadline deadline = Deadline::after(kLeaveWait);
    std::unique_lock<std::mutex> lock(mutex_);
    if (peer_left_ || stopped_ || channel_state_->broken()) {
      return;
    }
    post_control(Control::kGone);
    fence();
    while (!all_done() && !channel_state_->broken() && !deadline.expired()) {
      notify_.ask(Notify::Level::kAll);
      take_completions();
      if (!all_done()) {
        moved_.wait_for(lock, milliseconds(1));
      }
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

void Outgoing::stop() noexcept {
  Finished finished;
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  std::move(waiting_.begin(), waiting_.end(), std::back_inserter(finished));
  waiting_.clear();
  num_waiting_.store(0);
  for (OutLane& lane : lanes_) {
    lane.pair.reset();
  }
}

// ==== Functions that use the device. The caller holds the lock.

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

// Does not throw; channel_state_->check() reports failures.
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

// Makes the device report a completion for all earlier writes.
void Outgoing::fence() {
  for (OutLane& lane : lanes_) {
    if (lane.last_signalled != lane.num_posted) {
      post_empty(&lane, IBV_WR_RDMA_WRITE, 0);
    }
  }
}

// ---- Posting

// Sends as much as possible. Returns whether the message is complete.
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

// Asks the peer to send its credits immediately. Otherwise, the peer may delay them until the next
// message, which this end cannot send without a slot. Reserved slots are also in use, so this end
// can run out of slots although no message was urgent and few messages are in flight.
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
