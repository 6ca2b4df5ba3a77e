#include "common/completions.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <string>

#include "common/error.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ADAPTIVE_THREAD_SANITIZER
#endif
#elif defined(__SANITIZE_THREAD__)
#define ADAPTIVE_THREAD_SANITIZER
#endif

namespace adaptive {

// ---- Bell
//
//   ringing thread        owner
//   writes new data       sleeping = 1
//   ── full fence ──      ── full fence ──
//   reads sleeping        looks for new data
//
// At least one of the two sees the other's write. A ring between announce_sleep() and sleep()
// changes `rung`, and then the sleep does not begin.

struct Bell::Words {
  std::uint64_t magic;
  alignas(64) std::atomic<std::uint32_t> sleeping;
  alignas(64) std::atomic<std::uint32_t> rung;
};

namespace {

constexpr std::uint64_t kBellMagic = 0x4d41'5042'454c'4c31ULL;
std::size_t page_bytes() {
  return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

// Makes this thread's earlier writes visible to all threads before its later reads.
template <typename Word>
std::uint32_t load_after_fence(std::atomic<Word>& word) noexcept {
#if defined(ADAPTIVE_THREAD_SANITIZER)
  return word.fetch_or(0);  // the thread sanitizer does not support fences
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return word.load(std::memory_order_relaxed);
#endif
}

}  // namespace

Bell::Bell()
    : fd_(make_sealed_file("megatron-adaptive-bell", page_bytes())),
      region_(MappedRegion::shared(fd_.get(), page_bytes())) {
  words_ = new (region_.data()) Words{};
  words_->magic = kBellMagic;
}

Bell::Bell(ScopedFd fd, MappedRegion region)
    : fd_(std::move(fd)),
      region_(std::move(region)),
      words_(reinterpret_cast<Words*>(region_.data())) {}

Bell Bell::attach(ScopedFd fd) {
  const std::string what = "the descriptor does not hold a bell of this version";
  if (sealed_size(fd.get(), what) != page_bytes()) {
    throw Error(what + ": it is not one page");
  }
  MappedRegion region = MappedRegion::shared(fd.get(), page_bytes());
  Bell bell(std::move(fd), std::move(region));
  if (bell.words_->magic != kBellMagic) {
    throw Error(what + ": it starts with other bytes");
  }
  return bell;
}

bool Bell::ring() noexcept {
  if (load_after_fence(words_->sleeping) == 0) {
    return false;
  }
  words_->rung.fetch_add(1);
  futex_wake_all(words_->rung);
  return true;
}

std::uint32_t Bell::announce_sleep() noexcept {
  words_->sleeping.exchange(1);  // a full fence, unlike a store
  return words_->rung.load();
}

void Bell::sleep(std::uint32_t announced, const Deadline& deadline) {
  futex_wait(words_->rung, announced, deadline);
}

void Bell::end_sleep() noexcept {
  words_->sleeping.exchange(0);  // a full fence again, before the following check
}

// ---- Completions

bool Completions::poll_sources() noexcept {
  const std::lock_guard<std::mutex> lock(sources_mutex_);
  bool found_any = false;
  for (const auto& source : sources_) {
    found_any = source->poll(*this) || found_any;
  }
  return found_any;
}

std::optional<Item> Completions::pop() {
  if (num_items_.load(std::memory_order_acquire) == 0) {
    return std::nullopt;
  }
  const std::lock_guard<std::mutex> lock(items_mutex_);
  if (items_.empty()) {
    return std::nullopt;
  }
  std::optional<Item> item(std::move(items_.front()));
  items_.pop_front();
  num_items_.store(items_.size(), std::memory_order_release);
  return item;
}

std::optional<Item> Completions::poll() {
  // Items that other threads have put are older than the items that polling would find now. Both
  // kinds stay in the order of their channel.
  if (auto item = pop()) {
    return item;
  }
  return poll_sources() ? pop() : std::nullopt;
}

bool Completions::look() noexcept {
  return num_items_.load(std::memory_order_acquire) != 0 || poll_sources();
}

void Completions::sleep(const Deadline& deadline) {
  const std::uint32_t announced = bell_.announce_sleep();
  {
    const std::lock_guard<std::mutex> lock(sources_mutex_);
    for (const auto& source : sources_) {
      source->arm();
    }
  }
  try {
    if (!look()) {
      bell_.sleep(announced, deadline);
    }
  } catch (...) {
    bell_.end_sleep();
    throw;
  }
  bell_.end_sleep();
  // even if there is an item already, because a ringing thread leaves all sources to this thread
  poll_sources();
}

std::optional<Item> Completions::wait(const Deadline& deadline, std::chrono::nanoseconds longest) {
  std::optional<Deadline> end;
  for (;;) {
    if (auto item = poll()) {
      return item;
    }
    if (spin_.spin_until([this] { return look(); })) {
      continue;
    }
    if (!end) {
      end = longest == std::chrono::nanoseconds::max() ? deadline : deadline.at_most(longest);
    }
    if (end->expired()) {
      return std::nullopt;
    }
    sleep(*end);
  }
}

void Completions::put(Item item) {
  found(std::move(item));
  bell_.ring();
}

void Completions::found(Item item) {
  const std::lock_guard<std::mutex> lock(items_mutex_);
  items_.push_back(std::move(item));
  num_items_.store(items_.size(), std::memory_order_release);
}

void Completions::drain_sources() {
  if (poll_sources()) {
    bell_.ring();
  }
}

void Completions::add(std::shared_ptr<Source> source) {
  {
    const std::lock_guard<std::mutex> lock(sources_mutex_);
    sources_.push_back(std::move(source));
  }
  bell_.ring();  // the source may already have items
}

void Completions::remove(const Source* source) noexcept {
  std::shared_ptr<Source> last;  // destroyed after the lock is released
  const std::lock_guard<std::mutex> lock(sources_mutex_);
  const auto place = std::find_if(sources_.begin(), sources_.end(),
                                  [&](const auto& entry) { return entry.get() == source; });
  if (place != sources_.end()) {
    last = std::move(*place);
    sources_.erase(place);
  }
}

}  // namespace adaptive
