#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "common/error.h"
#include "common/fork_guard.h"
#include "common/link.h"

namespace adaptive {
namespace {

constexpr char kHeartbeat = 'h';
constexpr char kGoodbye = 'g';
constexpr auto kLongestPeriod = std::chrono::milliseconds(1000);
// Minimum number of ticks within the time limit. Each tick reads the socket and sends a heartbeat.
constexpr int kTicksPerLimit = 4;

}  // namespace

std::string silence_text(std::chrono::nanoseconds elapsed, std::chrono::milliseconds limit) {
  using Seconds = std::chrono::duration<double>;
  char text[160];
  std::snprintf(text, sizeof(text),
                "nothing, not even a heartbeat, came from it for %.1f s (limit %.3g s, "
                "--transport-silence-s): it is stopped, its node is down or the network is cut",
                Seconds(elapsed).count(), Seconds(limit).count());
  return text;
}

struct LinkWatch::Impl : std::enable_shared_from_this<LinkWatch::Impl> {
  Impl(Reactor& reactor_in, Link link_in, std::chrono::milliseconds silent_limit_in,
       std::function<void(const std::string&)> lost_in, std::function<void()> left_in)
      : reactor(reactor_in),
        link(std::move(link_in)),
        process(link.open_process()),
        silent_limit(silent_limit_in),
        lost(std::move(lost_in)),
        left(std::move(left_in)) {}

  void start();
  void stop() noexcept;
  void on_socket();
  void on_process();
  void on_tick();
  void read_all();
  void report(const std::string& reason);

  Reactor& reactor;
  Link link;
  ScopedFd process;
  const std::chrono::milliseconds silent_limit;
  std::function<void(const std::string&)> lost;
  std::function<void()> left;
  const ForkGuard guard;
  std::uint64_t timer = 0;
  std::atomic<bool> said_goodbye{false};

  // Members that only the reactor's thread uses.
  bool over = false;  // a goodbye came, or the loss was reported
  int silent_ticks = 0;
  Deadline::Clock::time_point heard = Deadline::Clock::now();
};

void LinkWatch::Impl::start() {
  const auto self = shared_from_this();
  const auto on_error = [self](const std::exception& error) { self->report(error.what()); };
  reactor.add(
      link.fd(), EPOLLIN | EPOLLRDHUP, [self](std::uint32_t) { self->on_socket(); }, on_error);
  if (process) {
    reactor.add(process.get(), EPOLLIN, [self](std::uint32_t) { self->on_process(); }, on_error);
  }
  const auto period = std::min(kLongestPeriod, silent_limit / kTicksPerLimit);
  timer = reactor.every(period, [self] { self->on_tick(); });
}

// Breaks the reference cycle, which exists because the reactor's entries own this object.
void LinkWatch::Impl::stop() noexcept {
  reactor.remove(link.fd());
  if (process) {
    reactor.remove(process.get());
  }
  if (timer != 0) {
    reactor.stop(timer);
  }
}

void LinkWatch::Impl::report(const std::string& reason) {
  if (!over) {
    over = true;
    lost(reason);
  }
}

// Reads everything that has arrived. Bytes after a goodbye are ignored.
void LinkWatch::Impl::read_all() {
  std::array<char, 256> bytes;
  while (!over) {
    const ssize_t count = ::recv(link.fd(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (count > 0) {
      silent_ticks = 0;
      heard = Deadline::Clock::now();
      for (ssize_t i = 0; i < count && !over; ++i) {
        const char byte = bytes[static_cast<std::size_t>(i)];
        if (byte == kGoodbye) {
          over = true;
          if (left) {
            left();
          }
        } else if (byte != kHeartbeat) {
          report("it sent something other than heartbeats");
        }
      }
    } else if (count == 0) {
      report("its end of the connection was closed without a goodbye");
    } else if (errno == EAGAIN) {
      return;
    } else if (errno != EINTR) {
      report(std::string("the connection broke: ") + std::strerror(errno));
    }
  }
}

void LinkWatch::Impl::on_socket() {
  read_all();
  if (over) {
    reactor.remove(link.fd());
  }
}

void LinkWatch::Impl::on_process() {
  // The socket may still contain a goodbye.
  read_all();
  report("its process ended");
  reactor.remove(process.get());
}

// Counts ticks instead of measuring time. After a pause of this process, the bytes that the peer
// sent meanwhile are therefore read before the peer is considered silent.
void LinkWatch::Impl::on_tick() {
  if (!said_goodbye.load()) {
    const char beat = kHeartbeat;
    // A failed send is ignored. If the buffer is full, the peer is not reading and will soon be
    // considered silent.
    [[maybe_unused]] const ssize_t sent = ::send(link.fd(), &beat, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  ++silent_ticks;
  read_all();
  const auto period = std::min(kLongestPeriod, silent_limit / kTicksPerLimit);
  if (!over && silent_ticks * period >= silent_limit) {
    report(silence_text(Deadline::Clock::now() - heard, silent_limit));
  }
}

LinkWatch::LinkWatch(Reactor& reactor, Link link, std::chrono::milliseconds silent_limit,
                     std::function<void(const std::string& reason)> lost,
                     std::function<void()> left)
    : impl_(std::make_shared<Impl>(reactor, std::move(link), silent_limit, std::move(lost),
                                   std::move(left))) {
  try {
    impl_->start();
  } catch (...) {
    impl_->stop();
    throw;
  }
}

LinkWatch::~LinkWatch() {
  impl_->stop();
  if (impl_->guard.in_maker() && impl_->said_goodbye.load()) {
    // Read the remaining bytes first. If unread bytes were left, closing would reset the
    // connection, and the reset could overtake the goodbye.
    std::array<char, 256> ignored;
    while (::recv(impl_->link.fd(), ignored.data(), ignored.size(), MSG_DONTWAIT) > 0) {
    }
  }
}

void LinkWatch::say_goodbye() noexcept {
  if (!impl_->guard.in_maker() || impl_->said_goodbye.exchange(true)) {
    return;
  }
  const char goodbye = kGoodbye;
  [[maybe_unused]] const ssize_t sent =
      ::send(impl_->link.fd(), &goodbye, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace adaptive
