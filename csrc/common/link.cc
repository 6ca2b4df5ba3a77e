#include "common/link.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "common/error.h"
#include "common/hello.h"
#include "common/socket_address.h"
#include "common/socket_io.h"

namespace adaptive {
namespace {

#ifndef SO_PEERPIDFD
constexpr int SO_PEERPIDFD = 77;  // Linux 6.5
#endif

constexpr auto kFirstRetry = std::chrono::milliseconds(2);
constexpr auto kLongestRetry = std::chrono::milliseconds(100);
constexpr auto kTickEvery = std::chrono::milliseconds(100);

// Sleeps between two attempts, because no event reports when the next attempt can succeed.
class Pause {
 public:
  Pause(const Deadline& deadline, const Tick& tick) : deadline_(deadline), tick_(tick) {}

  // Returns false when the deadline has passed.
  bool sleep() {
    if (deadline_.expired()) {
      return false;
    }
    std::this_thread::sleep_for(std::min<std::chrono::milliseconds>(
        next_, std::chrono::milliseconds(deadline_.remaining_ms())));
    since_tick_ += next_;
    if (since_tick_ >= kTickEvery) {
      since_tick_ = std::chrono::milliseconds(0);
      if (tick_) {
        tick_();
      }
    }
    next_ = std::min(2 * next_, kLongestRetry);
    return true;
  }

 private:
  const Deadline& deadline_;
  const Tick& tick_;
  std::chrono::milliseconds next_ = kFirstRetry;
  std::chrono::milliseconds since_tick_{0};
};

// Tries to connect once. If it fails and another attempt makes sense, returns an empty ScopedFd and
// leaves the reason in errno.
ScopedFd try_connect(const SocketAddress& address, const std::string& name,
                     const Deadline& deadline, const Tick& tick) {
  ScopedFd socket = open_stream_socket(address.family());
  if (::connect(socket.get(), address.get(), address.length()) == 0) {
    return socket;
  }
  int code = errno;
  if (code == EINPROGRESS || code == EINTR) {
    wait_ready(socket.get(), POLLOUT, deadline, tick, "no answer from " + name);
    socklen_t length = sizeof(code);
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &code, &length) != 0) {
      throw_errno("getsockopt", "SO_ERROR");
    }
    if (code == 0) {
      return socket;
    }
  }
  switch (code) {
    case ENOENT:  // the peer does not listen yet
    case ECONNREFUSED:
    case EAGAIN:  // the peer's queue is full
    case ECONNRESET:
    case ECONNABORTED:
    case ETIMEDOUT:  // the network is not ready yet
    case EHOSTUNREACH:
    case ENETUNREACH:
      errno = code;
      return ScopedFd();
    default:
      throw SystemError("connect", name, code);
  }
}

// Sends this process's hello and reads the reply. Returns false if the peer closed the connection
// without a reply.
bool shake_hands(int socket, const Identity& self, int peer, const std::string& name,
                 const Deadline& deadline, const Tick& tick) {
  const std::string what =
      "rank " + std::to_string(peer) + " at " + name + " did not answer within the time limit";
  Hello hello;
  hello.self = self;
  hello.target = peer;
  const HelloBytes bytes = encode_hello(hello);
  HelloBytes answer{};
  std::vector<ScopedFd> unwanted;
  try {
    send_all(socket, bytes.data(), bytes.size(), {}, deadline, tick, what);
    receive_all(socket, answer.data(), answer.size(), unwanted, deadline, tick, what);
  } catch (const DeadlineError&) {
    throw;
  } catch (const std::invalid_argument&) {
    throw;
  } catch (const Error&) {
    return false;
  }
  const std::optional<Hello> theirs = parse_hello(answer.data(), answer.size());
  if (!theirs) {
    throw Error("the process listening at " + name + " does not run this package");
  }
  if (theirs->verdict != Verdict::kWelcome) {
    throw Error("rank " + std::to_string(peer) + " at " + name +
                " refused this process: " + reason_of(theirs->verdict));
  }
  // The peer accepts this process, but the peer may be the wrong process.
  const Verdict verdict = judge_hello(*theirs, self);
  if (verdict != Verdict::kWelcome || theirs->self.rank != peer) {
    throw Error("the process at " + name + " is not rank " + std::to_string(peer) + ": " +
                reason_of(verdict == Verdict::kWelcome ? Verdict::kOtherTarget : verdict));
  }
  return true;
}

// Repeats the connection and the handshake until they succeed, the peer is found to be the wrong
// process, or the deadline passes.
ScopedFd connect_and_greet(const SocketAddress& address, const Identity& self, int peer,
                           const Deadline& deadline, const Tick& tick) {
  const std::string name = address.text();
  Pause pause(deadline, tick);
  std::string obstacle;
  do {
    ScopedFd socket = try_connect(address, name, deadline, tick);
    if (!socket) {
      obstacle = std::strerror(errno);
      continue;
    }
    if (address.family() == AF_UNIX && !peer_of_same_user(socket.get())) {
      throw Error("the process listening at " + name +
                  " runs as another user, so it is not trusted");
    }
    // If no process listens at a port in the range for outgoing connections, the kernel may give
    // this port to a socket and connect the socket to itself.
    if (address.family() != AF_UNIX && SocketAddress::local_of(socket.get()).text() == name) {
      obstacle = std::strerror(ECONNREFUSED);
      continue;
    }
    if (shake_hands(socket.get(), self, peer, name, deadline, tick)) {
      return socket;
    }
    obstacle = "it closed the connection";
  } while (pause.sleep());
  throw DeadlineError("rank " + std::to_string(peer) + " could not be reached at " + name +
                      " within the time limit: " + obstacle);
}

}  // namespace

void Link::send_record(const std::vector<std::uint8_t>& bytes, const std::vector<int>& fds,
                       const Deadline& deadline, const Tick& tick) {
  const RecordHeader header = encode_record_header(bytes.size(), fds.size());
  std::vector<std::uint8_t> frame(header.begin(), header.end());
  frame.insert(frame.end(), bytes.begin(), bytes.end());
  if (!fds.empty() && !unix_) {
    throw std::invalid_argument("only unix links can send descriptors");
  }
  send_all(fd(), frame.data(), frame.size(), fds, deadline, tick,
           "rank " + std::to_string(peer_) + " (" + remote_ +
               ") did not accept a record within the time limit");
}

Link::Record Link::recv_record(std::size_t max_bytes, std::size_t num_fds, const Deadline& deadline,
                               const Tick& tick) {
  const std::string from = "a record from rank " + std::to_string(peer_) + " (" + remote_ + ")";
  Record record;
  RecordHeader header{};
  receive_all(fd(), header.data(), header.size(), record.fds, deadline, tick, from);
  record.bytes.resize(parse_record_header(header.data(), header.size(), max_bytes, num_fds));
  receive_all(fd(), record.bytes.data(), record.bytes.size(), record.fds, deadline, tick, from);
  if (record.fds.size() != num_fds) {
    throw Error(from + " has " + std::to_string(record.fds.size()) + " descriptors instead of " +
                std::to_string(num_fds));
  }
  return record;
}

ScopedFd Link::open_process() const {
  if (!unix_) {
    return ScopedFd();
  }
  int fd = -1;
  socklen_t length = sizeof(fd);
  if (::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0) {
    return ScopedFd(fd);
  }
  if (peer_pid_ <= 0) {
    return ScopedFd();
  }
  return ScopedFd(static_cast<int>(::syscall(SYS_pidfd_open, peer_pid_, 0)));
}

Link connect_unix(const std::string& address, const Identity& self, int peer,
                  const Deadline& deadline, const Tick& tick) {
  Link link;
  link.fd_ =
      ForkSafeFd(connect_and_greet(SocketAddress::on_unix(address), self, peer, deadline, tick));
  link.peer_ = peer;
  link.peer_pid_ = peer_process(link.fd_.get());
  link.unix_ = true;
  link.remote_ = address;
  return link;
}

Link connect_tcp(const std::string& host, int port, const Identity& self, int peer,
                 const Deadline& deadline, const Tick& tick) {
  const SocketAddress address = SocketAddress::on_tcp(host, port);
  Link link;
  link.fd_ = ForkSafeFd(connect_and_greet(address, self, peer, deadline, tick));
  link.peer_ = peer;
  link.remote_ = address.text();
  return link;
}

}  // namespace adaptive
