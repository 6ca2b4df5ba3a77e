// The socket between two processes. With it, they authenticate each other, exchange the data that
// their channels need (descriptors, queue pair numbers), and notice when the peer exits.
//
//   unix   same node and user: abstract name, SO_PEERCRED checked, carries descriptors
//   tcp    any node: token of the job checked, both directions
//
// A link is created before training, by blocking calls with deadlines. Afterwards it belongs to a
// channel, which passes the link to the reactor (see LinkWatch).
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/fork_safe_fd.h"
#include "common/reactor.h"
#include "common/scoped_fd.h"

namespace adaptive {

using Token = std::array<std::uint8_t, 16>;  // known to the processes of one job only

// The identity of a process. The two sides of a connection first exchange their identities. If they
// do not match, the connection is closed.
struct Identity {
  Token token{};
  int rank = -1;
  std::string purpose;  // use of the link: "shm", "rdma" or "tcp"; at most 15 characters
};

// The socket is non-blocking and closed on exec; a forked child gets no copy of it.
class Link {
 public:
  Link() = default;
  Link(Link&&) noexcept = default;
  Link& operator=(Link&&) noexcept = default;

  int fd() const noexcept { return fd_.get(); }
  int peer() const noexcept { return peer_; }
  pid_t peer_pid() const noexcept { return peer_pid_; }  // unix links only, else 0
  bool is_unix() const noexcept { return unix_; }
  const std::string& remote() const noexcept { return remote_; }  // "10.0.0.3:4711", for messages

  // Returns a descriptor of the peer's process, which becomes readable when the process exits. A
  // child that the peer forked can keep the socket open, but it cannot hide the exit. Empty if the
  // kernel does not support it.
  ScopedFd open_process() const;

  // Sends a length-prefixed record with descriptors (unix links only).
  void send_record(const std::vector<std::uint8_t>& bytes, const std::vector<int>& fds,
                   const Deadline& deadline, const Tick& tick);
  struct Record {
    std::vector<std::uint8_t> bytes;
    std::vector<ScopedFd> fds;
  };
  // Receives a record. Throws DeadlineError, and Error if the record is larger than `max_bytes`, if
  // it does not have exactly `num_fds` descriptors, or if the peer has closed the connection
  // ("closed").
  Record recv_record(std::size_t max_bytes, std::size_t num_fds, const Deadline& deadline,
                     const Tick& tick);

  // Releases the socket to a channel that uses its own protocol.
  ForkSafeFd release() noexcept { return std::move(fd_); }

 private:
  friend class Listener;
  friend Link connect_unix(const std::string&, const Identity&, int, const Deadline&, const Tick&);
  friend Link connect_tcp(const std::string&, int, const Identity&, int, const Deadline&,
                          const Tick&);
  ForkSafeFd fd_;
  int peer_ = -1;
  pid_t peer_pid_ = 0;
  bool unix_ = false;
  std::string remote_;
};

// Waits for peers to connect. accept() waits for one particular peer, and keeps the connections of
// other peers until they are accepted.
class Listener {
 public:
  static Listener on_unix(const Identity& self);
  // `host`: numeric address of the interface to listen on, IPv4 or IPv6; port 0 for any.
  static Listener on_tcp(const std::string& host, int port, const Identity& self);
  Listener(Listener&&) noexcept;
  Listener& operator=(Listener&&) noexcept;
  ~Listener();

  std::string address() const;  // "@name" or "host:port" (IPv6 in brackets), for the peers
  std::size_t num_refused() const noexcept;  // number of rejected connections so far

  // Connections that do not belong to the job (wrong token, user or version, or other bytes than a
  // hello) are closed and counted, and never block other connections.
  Link accept(int peer, const std::string& purpose, const Deadline& deadline, const Tick& tick);

 private:
  struct Impl;
  explicit Listener(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Connects to `peer`. If the peer does not listen yet, waits for it. Throws DeadlineError with the
// address, and Error if either process rejects the identity of the other.
Link connect_unix(const std::string& address, const Identity& self, int peer,
                  const Deadline& deadline, const Tick& tick);
Link connect_tcp(const std::string& host, int port, const Identity& self, int peer,
                 const Deadline& deadline, const Tick& tick);

// Returns an error message for a peer from which nothing arrived for `elapsed`, with possible
// reasons.
std::string silence_text(std::chrono::nanoseconds elapsed, std::chrono::milliseconds limit);

// Watches a link that carries no payloads (shm, rdma). Calls `lost` once with a reason, on the
// reactor's thread, if the peer's process exits (pidfd), the socket is closed without a goodbye, or
// no heartbeat arrives for `silent_limit`. If the peer says goodbye first, `left` is called
// instead, if it is set.
class LinkWatch {
 public:
  LinkWatch(Reactor& reactor, Link link, std::chrono::milliseconds silent_limit,
            std::function<void(const std::string& reason)> lost, std::function<void()> left = {});
  ~LinkWatch();  // stops watching; calls no function afterwards
  LinkWatch(const LinkWatch&) = delete;
  LinkWatch& operator=(const LinkWatch&) = delete;

  // Tells the peer that this end is about to close, so that the closing is not reported as a loss.
  void say_goodbye() noexcept;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace adaptive
