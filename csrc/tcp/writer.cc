#include "tcp/writer.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "common/error.h"

namespace adaptive::tcp {
namespace {

// Maximum number of bytes that the caller's thread writes itself, if the socket accepts them. Data
// that is left to the reactor's thread may have to wait for a free processor.
constexpr std::size_t kDirectBytes = std::size_t{4} << 20;

std::shared_ptr<void> owner_of(const Keeper& keeper) {
  return keeper.make == nullptr ? nullptr : keeper.make(keeper.context);
}

}  // namespace

Writer::Writer(int socket, std::uint32_t credits, std::uint32_t slots,
               std::function<void(bool)> want_write)
    : socket_(socket),
      peer_slots_(credits),
      slots_(slots),
      want_write_(std::move(want_write)),
      credits_(credits) {}

void Writer::push(Waiting waiting) {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  if (stopped_ || goodbye_due_ || goodbye_said_) {
    throw Error("nothing can be sent on a closed channel");
  }
  queue_.push_back(std::move(waiting));
  unsent_.fetch_add(1, std::memory_order_relaxed);
}

void Writer::send(const Message& message, const void* data, const Keeper& keeper) {
  const auto* const bytes = static_cast<const std::byte*>(data);
  std::unique_lock<std::mutex> writing(write_mutex_, std::defer_lock);
  if (wants_.load() || !writing.try_lock()) {
    push({message, bytes, owner_of(keeper)});
    if (has_work()) {
      pump(kDirectBytes);
    }
    return;
  }
  Owners done;
  // The message needs no owner of the caller's memory as long as this thread holds write_mutex_,
  // because no other thread can write or remove it. Most messages are written in this time.
  push({message, bytes, nullptr});
  write_some(kDirectBytes, done);
  if (unsent() != 0) {
    keep_last(keeper);
  }
  writing.unlock();
  done.clear();
  if (has_work()) {
    pump(kDirectBytes);
  }
}

void Writer::keep_last(const Keeper& keeper) {
  std::shared_ptr<void> owner = owner_of(keeper);
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  if (!queue_.empty()) {
    queue_.back().owner = std::move(owner);
  } else if (current_) {
    current_->owner = std::move(owner);
  }
}

void Writer::add_credits(std::uint32_t count) {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  if (count > peer_slots_ - credits_) {
    throw Error("it returned " + std::to_string(count) + " slots where " +
                std::to_string(peer_slots_ - credits_) + " were in use");
  }
  credits_ += count;
}

bool Writer::use_slot() {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  return used_slots_ < slots_ && ++used_slots_ != 0;
}

bool Writer::free_slot() {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  ++owed_credits_;
  control_due_ = control_due_ || 2 * used_slots_ >= slots_;
  return control_due_;
}

void Writer::beat() {
  if (!wrote_.exchange(false)) {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    control_due_ = true;
  }
}

void Writer::say_goodbye() {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  goodbye_due_ = !goodbye_said_ && !stopped_;
}

bool Writer::work_due() {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  return !stopped_ &&
         ((!queue_.empty() && credits_ != 0) || control_due_ || (goodbye_due_ && queue_.empty()));
}

bool Writer::has_work() {
  return !wants_.load() && broken() == 0 && work_due();
}

void Writer::pump(std::size_t budget_bytes) {
  do {
    Owners done;
    const std::unique_lock<std::mutex> writing(write_mutex_, std::try_to_lock);
    if (!writing.owns_lock()) {
      return;  // the writing thread checks for work again after it has released the mutex
    }
    write_some(budget_bytes, done);
  } while (has_work());
}

void Writer::set_want(bool want) {
  if (wants_.load() != want) {
    wants_.store(want);
    want_write_(want);
  }
}

void Writer::write_some(std::size_t budget_bytes, Owners& done) {
  while (budget_bytes != 0) {
    if (head_bytes_ == 0 && !next_frame()) {
      set_want(false);
      return;
    }
    const bool whole = write_frame(budget_bytes);
    if (broken() != 0) {
      set_want(false);
      return;
    }
    if (!whole) {
      break;
    }
    finish_frame(done);
  }
  set_want(head_bytes_ != 0 || current_ != nullptr || work_due());
}

bool Writer::next_frame() {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  if (stopped_) {
    return false;
  }
  frame_is_goodbye_ = false;
  FrameType type = FrameType::kControl;
  if (current_) {
    type = FrameType::kMore;
  } else if (!queue_.empty() && credits_ != 0) {
    type = FrameType::kStart;
    --credits_;
    current_ = std::make_unique<Waiting>(std::move(queue_.front()));
    queue_.pop_front();
    written_bytes_ = 0;
  } else if (goodbye_due_ && queue_.empty()) {
    type = FrameType::kGoodbye;
    frame_is_goodbye_ = true;
  } else if (!control_due_) {
    return false;
  }
  set_frame(type, owed_credits_);
  used_slots_ -= std::exchange(owed_credits_, 0);
  control_due_ = false;
  return true;
}

void Writer::set_frame(FrameType type, std::uint32_t credits) {
  Frame frame{type, credits, 0};
  head_bytes_ = kFrameBytes;
  head_done_ = body_done_ = body_bytes_ = 0;
  if (current_) {
    const Message& message = current_->message;
    frame.piece_bytes = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(kPieceBytes, message.nbytes - written_bytes_));
    body_ = current_->data + written_bytes_;
    body_bytes_ = frame.piece_bytes;
    if (type == FrameType::kStart) {
      std::memcpy(head_.data() + kFrameBytes, &message, sizeof(message));
      head_bytes_ += sizeof(message);
    }
  }
  encode_frame(frame, head_.data());
}

bool Writer::write_frame(std::size_t& budget_bytes) {
  while (head_done_ + body_done_ < head_bytes_ + body_bytes_) {
    if (budget_bytes == 0) {
      return false;
    }
    iovec parts[2];
    std::size_t count = 0;
    if (head_done_ < head_bytes_) {
      parts[count++] = {head_.data() + head_done_, head_bytes_ - head_done_};
    }
    if (body_done_ < body_bytes_) {
      parts[count++] = {const_cast<std::byte*>(body_) + body_done_,
                        std::min(body_bytes_ - body_done_, budget_bytes)};
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(socket_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      const std::size_t of_head =
          std::min(static_cast<std::size_t>(sent), head_bytes_ - head_done_);
      head_done_ += of_head;
      body_done_ += static_cast<std::size_t>(sent) - of_head;
      budget_bytes -= std::min(static_cast<std::size_t>(sent), budget_bytes);
      wrote_.store(true);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return false;
    } else if (errno != EINTR) {
      broken_.store(errno);
      return false;
    }
  }
  return true;
}

void Writer::finish_frame(Owners& done) {
  head_bytes_ = 0;
  written_bytes_ += body_bytes_;
  const bool message_done = current_ && written_bytes_ == current_->message.nbytes;
  if (message_done) {
    done.push_back(std::move(current_->owner));
    current_.reset();
  }
  if (message_done || frame_is_goodbye_) {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    if (message_done) {
      unsent_.fetch_sub(1, std::memory_order_relaxed);
    } else {
      goodbye_due_ = false;
      goodbye_said_ = true;
    }
    emptied_.notify_all();
  }
}

bool Writer::wait_empty(const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(queue_mutex_);
  while (unsent() != 0 || goodbye_due_) {
    if (stopped_) {
      throw Error("the channel ended with " + std::to_string(unsent()) + " messages unsent");
    }
    if (deadline.expired()) {
      return false;
    }
    emptied_.wait_for(lock, std::chrono::milliseconds(deadline.remaining_ms()));
  }
  return true;
}

void Writer::stop() noexcept {
  std::deque<Waiting> left;
  std::unique_ptr<Waiting> begun;
  const std::lock_guard<std::mutex> writing(write_mutex_);
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  stopped_ = true;
  goodbye_due_ = false;  // no peer is left to receive it
  wants_.store(false);
  left.swap(queue_);
  begun.swap(current_);
  head_bytes_ = 0;
  emptied_.notify_all();
}

}  // namespace adaptive::tcp
