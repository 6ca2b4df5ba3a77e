#include "common/reactor.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

#include "common/deadline.h"
#include "common/error.h"
#include "common/fork_guard.h"
#include "common/scoped_fd.h"

namespace adaptive {
namespace {

using Clock = Deadline::Clock;

constexpr std::uint64_t kWakeId = 0;
constexpr std::size_t kEventsPerRound = 64;

// A handler whose descriptor is watched. After the kernel has reported an event, the handler may be
// removed and the descriptor's number reused before the event is processed. Events therefore carry
// an id that is never reused.
struct Watch {
  std::uint64_t id = 0;
  int fd = -1;
  Reactor::Handler handler;
  std::function<void(const std::exception&)> on_error;
};

// The part of the kernel's struct sched_attr that is needed here.
struct Scheduling {
  std::uint32_t size = sizeof(Scheduling);
  std::uint32_t policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime_ns = 0;
  std::uint64_t deadline_ns = 0;
  std::uint64_t period_ns = 0;
};

// Requests short time slices for this thread, which runs for a few microseconds, often on the same
// CPU as a thread that computes. Linux 6.12 and later run a thread with short slices soon after a
// wake, instead of only after the other thread's slice of a few milliseconds. Earlier versions
// ignore the setting.
void ask_for_short_slices() noexcept {
  constexpr std::uint64_t kSliceNs = 100'000;
  Scheduling now;
  if (::syscall(SYS_sched_getattr, 0, &now, sizeof(now), 0) != 0 || now.policy != SCHED_OTHER) {
    return;
  }
  now.size = sizeof(now);
  now.flags = 0;
  now.runtime_ns = kSliceNs;
  ::syscall(SYS_sched_setattr, 0, &now, 0);
}

struct Timer {
  std::uint64_t id = 0;
  Clock::time_point due;
  std::chrono::milliseconds period{};
  Reactor::Task task;
};

// Blocks the signals that programs handle in their main thread. The signals that report faults of
// this thread itself stay enabled, so that crash reports work.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) {
      ::sigdelset(&all, fault);
    }
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;
  ~AllSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace

struct Reactor::Impl : std::enable_shared_from_this<Reactor::Impl> {
  Impl();

  void start();
  void run();
  int wait_ms();
  void run_tasks();
  void run_timers();
  void dispatch(std::uint64_t id, std::uint32_t events);
  void forget(const Watch& watch) noexcept;
  void wake() noexcept;
  void control(int operation, int fd, std::uint32_t events, std::uint64_t id);
  void keep_error() noexcept;
  void rethrow_kept();
  void wait_until_not_running(std::unique_lock<std::mutex>& lock, std::uint64_t id);
  bool is_own_thread() const noexcept { return thread.get_id() == std::this_thread::get_id(); }
  // A forked child does not have the reactor's thread, and the kernel's objects belong to the
  // parent.
  bool forked() const noexcept { return !guard.in_maker(); }

  ScopedFd epoll;
  ScopedFd wake_fd;
  std::thread thread;
  const ForkGuard guard;
  std::atomic<bool> stopping{false};
  std::atomic<bool> wake_sent{false};

  std::mutex mutex;
  std::condition_variable finished;  // a handler or a timer's task has returned
  std::uint64_t next_id = kWakeId + 1;
  std::uint64_t running = kWakeId;  // id of the current handler or task
  std::unordered_map<int, std::shared_ptr<Watch>> watches;
  std::unordered_map<std::uint64_t, std::shared_ptr<Watch>> watches_by_id;
  std::map<std::uint64_t, std::shared_ptr<Timer>> timers;
  std::deque<Task> tasks;
  std::exception_ptr kept_error;
};

Reactor::Impl::Impl() : epoll(::epoll_create1(EPOLL_CLOEXEC)), wake_fd(make_eventfd()) {
  if (!epoll) {
    throw_errno("epoll_create1", "EPOLL_CLOEXEC");
  }
  control(EPOLL_CTL_ADD, wake_fd.get(), EPOLLIN, kWakeId);
}

void Reactor::Impl::start() {
  const AllSignalsBlocked blocked;
  // The mutex ensures that the new thread sees `thread` before it runs anything.
  const std::lock_guard<std::mutex> lock(mutex);
  thread = std::thread([self = shared_from_this()] { self->run(); });
  ::pthread_setname_np(thread.native_handle(), "adaptive-io");
}

void Reactor::Impl::control(int operation, int fd, std::uint32_t events, std::uint64_t id) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll.get(), operation, fd, &event) != 0) {
    throw_errno("epoll_ctl", "descriptor " + std::to_string(fd));
  }
}

void Reactor::Impl::wake() noexcept {
  if (!wake_sent.exchange(true)) {
    signal(wake_fd);
  }
}

void Reactor::Impl::keep_error() noexcept {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!kept_error) {
    kept_error = std::current_exception();
  }
}

// Nobody waits for a task, so its error is reported to the next caller of the reactor.
void Reactor::Impl::rethrow_kept() {
  if (kept_error) {
    std::rethrow_exception(std::exchange(kept_error, nullptr));
  }
}

void Reactor::Impl::wait_until_not_running(std::unique_lock<std::mutex>& lock, std::uint64_t id) {
  if (!is_own_thread()) {
    finished.wait(lock, [&] { return running != id; });
  }
}

void Reactor::Impl::run() {
  {
    const std::lock_guard<std::mutex> started(mutex);
  }
  ask_for_short_slices();
  std::array<epoll_event, kEventsPerRound> events;
  while (!stopping.load()) {
    const int count =
        ::epoll_wait(epoll.get(), events.data(), static_cast<int>(events.size()), wait_ms());
    for (int i = 0; i < count && !stopping.load(); ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == kWakeId) {
        clear(wake_fd);
        // Cleared before the tasks are read: a task added later wakes the thread again.
        wake_sent.store(false);
      } else {
        dispatch(event.data.u64, event.events);
      }
    }
    run_tasks();
    run_timers();
  }
}

int Reactor::Impl::wait_ms() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!tasks.empty()) {
    return 0;
  }
  if (timers.empty()) {
    return -1;
  }
  auto first = Clock::time_point::max();
  for (const auto& [id, timer] : timers) {
    first = std::min(first, timer->due);
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(first - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000));
}

void Reactor::Impl::run_tasks() {
  std::deque<Task> due;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    due.swap(tasks);
  }
  for (Task& task : due) {
    try {
      task();
    } catch (...) {
      keep_error();
    }
  }
}

void Reactor::Impl::run_timers() {
  const auto now = Clock::now();
  for (std::uint64_t after = 0;;) {
    std::shared_ptr<Timer> timer;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      auto entry = timers.upper_bound(after);
      while (entry != timers.end() && entry->second->due > now) {
        ++entry;
      }
      if (entry == timers.end()) {
        return;
      }
      timer = entry->second;
      timer->due = now + timer->period;
      running = timer->id;
    }
    after = timer->id;
    bool failed = false;
    try {
      timer->task();
    } catch (...) {
      keep_error();
      failed = true;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex);
      running = kWakeId;
      if (failed) {
        timers.erase(after);
      }
    }
    finished.notify_all();
  }
}

void Reactor::Impl::forget(const Watch& watch) noexcept {
  const std::lock_guard<std::mutex> lock(mutex);
  if (watches_by_id.erase(watch.id) != 0) {
    watches.erase(watch.fd);
    ::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, watch.fd, nullptr);
  }
}

void Reactor::Impl::dispatch(std::uint64_t id, std::uint32_t events) {
  std::shared_ptr<Watch> watch;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto entry = watches_by_id.find(id);
    if (entry == watches_by_id.end()) {
      return;
    }
    watch = entry->second;
    running = id;
  }
  try {
    try {
      watch->handler(events);
    } catch (const std::exception& error) {
      forget(*watch);
      watch->on_error(error);
    }
  } catch (...) {
    keep_error();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    running = kWakeId;
  }
  finished.notify_all();
}

Reactor::Reactor() : impl_(std::make_shared<Impl>()) {
  impl_->start();
}

Reactor::~Reactor() {
  if (impl_->forked()) {
    // Leaks the copy of the thread object, which can be neither joined nor destroyed in the child.
    new std::shared_ptr<Impl>(std::move(impl_));
    return;
  }
  impl_->stopping.store(true);
  impl_->wake();
  // If a handler held the last reference, this destructor runs on the reactor's own thread, which
  // cannot join itself.
  if (impl_->is_own_thread()) {
    impl_->thread.detach();
  } else {
    impl_->thread.join();
  }
}

void Reactor::add(int fd, std::uint32_t events, Handler handler,
                  std::function<void(const std::exception&)> on_error) {
  if (impl_->forked()) {
    throw Error("a reactor cannot be used in a forked child of the process that created it");
  }
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->rethrow_kept();
  if (impl_->watches.count(fd) != 0) {
    throw Error("descriptor " + std::to_string(fd) + " is already in the reactor");
  }
  auto watch = std::make_shared<Watch>();
  watch->id = impl_->next_id++;
  watch->fd = fd;
  watch->handler = std::move(handler);
  watch->on_error = std::move(on_error);
  impl_->watches.emplace(fd, watch);
  impl_->watches_by_id.emplace(watch->id, watch);
  try {
    impl_->control(EPOLL_CTL_ADD, fd, events, watch->id);
  } catch (...) {
    impl_->watches.erase(fd);
    impl_->watches_by_id.erase(watch->id);
    throw;
  }
}

void Reactor::modify(int fd, std::uint32_t events) {
  if (impl_->forked()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  const auto entry = impl_->watches.find(fd);
  // The descriptor may have been removed meanwhile, for example because its handler failed.
  if (entry != impl_->watches.end()) {
    impl_->control(EPOLL_CTL_MOD, fd, events, entry->second->id);
  }
}

void Reactor::remove(int fd) noexcept {
  if (impl_->forked()) {
    return;
  }
  std::shared_ptr<Watch> watch;  // destroyed outside the lock, together with the handler's objects
  std::unique_lock<std::mutex> lock(impl_->mutex);
  const auto entry = impl_->watches.find(fd);
  if (entry == impl_->watches.end()) {
    return;
  }
  watch = entry->second;
  impl_->watches.erase(entry);
  impl_->watches_by_id.erase(watch->id);
  ::epoll_ctl(impl_->epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
  impl_->wait_until_not_running(lock, watch->id);
  lock.unlock();
}

void Reactor::post(Task task) {
  if (impl_->forked()) {
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->tasks.push_back(std::move(task));
  }
  if (!impl_->is_own_thread()) {
    impl_->wake();
  }
}

std::uint64_t Reactor::every(std::chrono::milliseconds period, Task task) {
  if (impl_->forked()) {
    throw Error("a reactor cannot be used in a forked child of the process that created it");
  }
  std::uint64_t id = 0;
  {
    const std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->rethrow_kept();
    auto timer = std::make_shared<Timer>();
    timer->id = id = impl_->next_id++;
    timer->period = std::max(period, std::chrono::milliseconds(1));
    timer->due = Clock::now() + timer->period;
    timer->task = std::move(task);
    impl_->timers.emplace(id, std::move(timer));
  }
  impl_->wake();
  return id;
}

void Reactor::stop(std::uint64_t timer) noexcept {
  if (impl_->forked()) {
    return;
  }
  std::shared_ptr<Timer> stopped;
  std::unique_lock<std::mutex> lock(impl_->mutex);
  const auto entry = impl_->timers.find(timer);
  if (entry == impl_->timers.end()) {
    return;
  }
  stopped = entry->second;
  impl_->timers.erase(entry);
  impl_->wait_until_not_running(lock, timer);
  lock.unlock();
}

}  // namespace adaptive
