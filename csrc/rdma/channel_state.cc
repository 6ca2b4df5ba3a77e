#include "rdma/channel_state.h"

#include <exception>
#include <utility>

namespace adaptive::rdma {

void ChannelState::fail(Failure::Kind kind, const std::string& finding) noexcept {
  try {
    if (ended_.load() || failed()) {
      return;
    }
    std::string text;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failed()) {
        return;
      }
      kind_ = kind;
      text_ = text = "RDMA channel with " + peer_name_ + ": " + finding + "; " + last_received();
      failed_.store(true, std::memory_order_release);
    }
    session_.completions->put(Failure{kind, peer_, std::move(text)});
  } catch (...) {
    failed_.store(true, std::memory_order_release);  // there is no memory for words
  }
}

std::string ChannelState::last_received() const {
  return any_received_ ? "the last message received from it was " + describe(last_)
                       : "no message was received from it";
}

void ChannelState::note_received(const Message& message) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  any_received_ = true;
  last_ = message;
}

void ChannelState::throw_failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (kind_ == Failure::Kind::kPeerLost) {
    throw PeerLostError(text_);
  }
  throw Error(text_);
}

}  // namespace adaptive::rdma
