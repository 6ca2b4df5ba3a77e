#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <list>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/hello.h"
#include "common/link.h"
#include "common/socket_address.h"
#include "common/socket_io.h"

namespace adaptive {
namespace {

using Clock = Deadline::Clock;

constexpr auto kSlice = std::chrono::milliseconds(100);
// Peers send their hello immediately after they connect. A connection that takes longer is not from
// a peer, or the peer will connect again.
constexpr auto kHelloLimit = std::chrono::seconds(5);
// A peer whose connection broke connects again immediately; a failed peer does not.
constexpr auto kReconnectLimit = std::chrono::seconds(1);
// Limits the number of descriptors that connections from unknown processes can use up.
constexpr std::size_t kMostHalfOpen = 64;

std::string random_name() {
  std::array<std::uint8_t, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw_errno("getrandom", std::to_string(bytes.size()) + " bytes");
  }
  std::string name = "@megatron-adaptive-";
  for (const std::uint8_t byte : bytes) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

// A connection whose hello is not complete yet.
struct HalfOpen {
  ScopedFd fd;
  HelloBytes bytes{};
  std::size_t filled_bytes = 0;
  Clock::time_point since;
};

// Returns whether the other end closed without sending anything.
bool ended(int socket) {
  char ignored = 0;
  const ssize_t got = ::recv(socket, &ignored, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

}  // namespace

struct Listener::Impl {
  using Key = std::pair<int, std::string>;  // rank, purpose

  void listen(const SocketAddress& address);
  void accept_new();
  void look_at_all();
  // Returns true when there is nothing left to wait for.
  bool advance(HalfOpen& guest);
  void answer(HalfOpen& guest, const Hello& hello);
  void wait(const Deadline& deadline);

  Identity self;
  bool is_unix = false;
  ScopedFd fd;
  std::list<HalfOpen> half_open;  // oldest first
  std::map<Key, Link> ready;
  std::size_t refused = 0;
};

void Listener::Impl::listen(const SocketAddress& address) {
  fd = open_stream_socket(address.family());
  if (::bind(fd.get(), address.get(), address.length()) != 0) {
    throw_errno("bind", address.text());
  }
  if (::listen(fd.get(), SOMAXCONN) != 0) {
    throw_errno("listen", address.text());
  }
}

void Listener::Impl::accept_new() {
  for (;;) {
    ScopedFd guest(::accept4(fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!guest) {
      const bool out_of_descriptors = errno == EMFILE || errno == ENFILE;
      if (out_of_descriptors && !half_open.empty()) {
        half_open.pop_front();
        ++refused;
        continue;
      }
      if (errno == EINVAL || errno == EBADF || errno == ENOTSOCK || out_of_descriptors) {
        throw_errno("accept4", SocketAddress::local_of(fd.get()).text());
      }
      // no connection is waiting, or it was closed again; other errors do not concern this process
      return;
    }
    if (is_unix && !peer_of_same_user(guest.get())) {
      ++refused;
      continue;
    }
    if (half_open.size() >= kMostHalfOpen) {
      half_open.pop_front();
      ++refused;
    }
    HalfOpen entry;
    entry.fd = std::move(guest);
    entry.since = Clock::now();
    half_open.push_back(std::move(entry));
  }
}

void Listener::Impl::look_at_all() {
  const auto now = Clock::now();
  for (auto guest = half_open.begin(); guest != half_open.end();) {
    const bool done = advance(*guest) || now - guest->since > kHelloLimit;
    refused += done && guest->fd ? 1 : 0;
    guest = done ? half_open.erase(guest) : std::next(guest);
  }
}

bool Listener::Impl::advance(HalfOpen& guest) {
  std::vector<ScopedFd> unwanted;
  try {
    while (guest.filled_bytes < kHelloBytes) {
      // Reads no byte beyond the hello, because the bytes after it belong to the channel.
      switch (receive_some(guest.fd.get(), guest.bytes.data() + guest.filled_bytes,
                           kHelloBytes - guest.filled_bytes, guest.filled_bytes, unwanted)) {
        case IoResult::kProgress:
          continue;
        case IoResult::kNotNow:
          return false;
        case IoResult::kEnd:
          return true;
      }
    }
    if (const std::optional<Hello> hello = parse_hello(guest.bytes.data(), kHelloBytes)) {
      answer(guest, *hello);
    }
  } catch (const Error&) {
    // A broken connection of an unknown process does not matter, and a peer connects again.
  }
  return true;
}

void Listener::Impl::answer(HalfOpen& guest, const Hello& hello) {
  Hello reply;
  reply.self = self;
  reply.self.purpose = hello.self.purpose;
  reply.target = hello.self.rank;
  reply.verdict = judge_hello(hello, self);
  const HelloBytes bytes = encode_hello(reply);
  // The reply is short enough to fit into the buffer of a new socket.
  const ssize_t sent = ::send(guest.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (sent != static_cast<ssize_t>(bytes.size()) || reply.verdict != Verdict::kWelcome) {
    return;
  }
  Link link;
  link.peer_ = hello.self.rank;
  link.unix_ = is_unix;
  if (is_unix) {
    link.peer_pid_ = peer_process(guest.fd.get());
    link.remote_ = "process " + std::to_string(link.peer_pid_);
  } else {
    tune_tcp(guest.fd.get());
    link.remote_ = SocketAddress::remote_of(guest.fd.get()).text();
  }
  link.fd_ = ForkSafeFd(std::move(guest.fd));
  // A second connection from the same peer replaces the first, because the peer has given up the
  // first.
  ready.insert_or_assign(Key(hello.self.rank, hello.self.purpose), std::move(link));
}

void Listener::Impl::wait(const Deadline& deadline) {
  std::vector<pollfd> entries{{fd.get(), POLLIN, 0}};
  for (const HalfOpen& guest : half_open) {
    entries.push_back({guest.fd.get(), POLLIN, 0});
  }
  if (::poll(entries.data(), entries.size(), deadline.at_most(kSlice).remaining_ms()) < 0 &&
      errno != EINTR) {
    throw_errno("poll", "a listener and its guests");
  }
}

Listener::Listener(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Listener::Listener(Listener&&) noexcept = default;
Listener& Listener::operator=(Listener&&) noexcept = default;
Listener::~Listener() = default;

Listener Listener::on_unix(const Identity& self) {
  auto impl = std::make_unique<Impl>();
  impl->self = self;
  impl->is_unix = true;
  impl->listen(SocketAddress::on_unix(random_name()));
  return Listener(std::move(impl));
}

Listener Listener::on_tcp(const std::string& host, int port, const Identity& self) {
  auto impl = std::make_unique<Impl>();
  impl->self = self;
  impl->listen(SocketAddress::on_tcp(host, port));
  return Listener(std::move(impl));
}

std::string Listener::address() const {
  return SocketAddress::local_of(impl_->fd.get()).text();
}

std::size_t Listener::num_refused() const noexcept {
  return impl_->refused;
}

Link Listener::accept(int peer, const std::string& purpose, const Deadline& deadline,
                      const Tick& tick) {
  auto next_tick = Clock::now() + kSlice;
  // time at which this process noticed that the peer had closed its connection again
  std::optional<Clock::time_point> gave_up;
  for (;;) {
    impl_->accept_new();
    impl_->look_at_all();
    const auto found = impl_->ready.find(Impl::Key(peer, purpose));
    if (found != impl_->ready.end()) {
      Link link = std::move(found->second);
      impl_->ready.erase(found);
      if (!ended(link.fd())) {
        return link;
      }
      gave_up = Clock::now();
    }
    if (gave_up && Clock::now() - *gave_up > kReconnectLimit) {
      throw Error("rank " + std::to_string(peer) + " connected to " + address() + " for '" +
                  purpose +
                  "' and closed it again: it could not open its end of the channel, or "
                  "its process ended");
    }
    if (deadline.expired()) {
      throw DeadlineError("rank " + std::to_string(peer) + " did not connect to " + address() +
                          " for '" + purpose + "' within the time limit (" +
                          std::to_string(impl_->refused) + " other connections were refused)");
    }
    impl_->wait(deadline);
    if (Clock::now() >= next_tick) {
      next_tick = Clock::now() + kSlice;
      if (tick) {
        tick();
      }
    }
  }
}

}  // namespace adaptive
