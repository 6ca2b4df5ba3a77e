#include "common/channel_state.h"

#include <chrono>
#include <stdexcept>

#include "common/error.h"

namespace adaptive {

void check_options(const ChannelOptions& options) {
  if (options.slots < 1 || options.slots > kMostSlots || options.slot_bytes < 1 ||
      options.slot_bytes > kLargestSlotBytes) {
    throw std::invalid_argument("slots " + std::to_string(options.slots) + " of " +
                                std::to_string(options.slot_bytes) + " bytes must be 1 to " +
                                std::to_string(kMostSlots) + " slots of 1 byte to 1 TiB");
  }
  if (options.silent_limit < kLeastSilence || options.silent_limit > kMostSilence) {
    throw std::invalid_argument("silent_limit " + std::to_string(options.silent_limit.count()) +
                                " ms must be within 10 ms and a day");
  }
}

ChannelState::ChannelState(const Session& session, int peer, const std::string& label)
    : completions_(session.completions),
      reactor_(session.reactor),
      rank_(session.rank),
      job_(session.job),
      peer_(peer),
      peer_name_(session.describe ? session.describe(peer) : "rank " + std::to_string(peer)),
      label_(label.empty() ? label : label + peer_name_ + ": ") {}

void ChannelState::check_process() const {
  if (!in_maker()) {
    throw Error("the channel to " + peer_name_ +
                " belongs to the process that opened it, not to its forked child");
  }
}

void ChannelState::drain_sources() const {
  if (const auto completions = completions_.lock()) {
    completions->drain_sources();
  }
}

void ChannelState::post(Reactor::Task task) const noexcept {
  try {
    if (const auto reactor = reactor_.lock()) {
      reactor->post(std::move(task));
    }
  } catch (...) {  // no memory: the next event or wait notices the failure
  }
}

std::string ChannelState::text_of(const std::string& finding) const {
  std::string text = label_ + finding;
  const std::string seen = "; seen by rank " + std::to_string(rank_);
  if (!any_received_.load(std::memory_order_acquire)) {
    return text + "; no message had come from it" + seen;
  }
  Message last;
  last.kind = last_kind_.load(std::memory_order_relaxed);
  last.chunk = last_chunk_.load(std::memory_order_relaxed);
  last.microbatch = last_microbatch_.load(std::memory_order_relaxed);
  last.step = last_step_.load(std::memory_order_relaxed);
  return text + "; the last message from it was " + describe(last) + seen;
}

void ChannelState::break_off(Failure::Kind kind, const std::string& finding) noexcept {
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_.load(std::memory_order_relaxed)) {
      kind_ = kind;
      text_ = text_of(finding);
    }
  } catch (...) {  // no memory for the text
  }
  broken_.store(true, std::memory_order_release);
}

void ChannelState::fail(Failure::Kind kind, const std::string& finding) noexcept {
  break_off(kind, finding);
  const auto completions = completions_.lock();
  if (completions == nullptr || reported_.exchange(true)) {
    return;
  }
  try {
    completions->put(Failure{kind, peer_, text_of(finding)});
  } catch (...) {
    reported_.store(false);  // no memory now: the next thread that notices the failure reports it
  }
}

void ChannelState::throw_failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (kind_ == Failure::Kind::kPeerLost) {
    throw PeerLostError(text_);
  }
  throw Error(text_);
}

void ChannelState::prepare(Message& message, std::uint64_t sequence, std::uint64_t limit_bytes,
                           bool crc) const {
  check();
  if (message.nbytes > limit_bytes) {
    throw Error(describe(message) + " to " + peer_name_ + " has " + std::to_string(message.nbytes) +
                " bytes, more than the limit of " + std::to_string(limit_bytes));
  }
  message.magic = kMessageMagic;
  message.version = kMessageVersion;
  message.job = job_;
  message.sequence = sequence;
  message.offset = 0;
  message.piece_bytes = message.nbytes;
  message.has_crc = crc ? 1 : 0;
  message.crc = 0;
  message.reserved = 0;
  check_message(message, job_, message.nbytes, rank_);
}

void ChannelState::note_received(const Message& message) noexcept {
  last_kind_.store(message.kind, std::memory_order_relaxed);
  last_chunk_.store(message.chunk, std::memory_order_relaxed);
  last_microbatch_.store(message.microbatch, std::memory_order_relaxed);
  last_step_.store(message.step, std::memory_order_relaxed);
  any_received_.store(true, std::memory_order_release);
}

}  // namespace adaptive
