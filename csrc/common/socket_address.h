// Addresses of stream sockets, and the kernel's information about the peer process.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <string>

#include "common/scoped_fd.h"

namespace adaptive {

class SocketAddress {
 public:
  // The address of an abstract name ("@..."). Other names would leave files and are not allowed.
  // Throws std::invalid_argument.
  static SocketAddress on_unix(const std::string& name);
  // `host` is a numeric IPv4 or IPv6 address, with or without brackets. Throws
  // std::invalid_argument.
  static SocketAddress on_tcp(const std::string& host, int port);
  // The address that a socket is bound to, or the address of its peer.
  static SocketAddress local_of(int socket);
  static SocketAddress remote_of(int socket);

  const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const noexcept { return length_; }
  int family() const noexcept { return storage_.ss_family; }
  std::string text() const;  // "@name", "10.0.0.3:4711", "[fe80::1%eth0]:4711"

 private:
  static SocketAddress asked(int socket, int (*ask)(int, sockaddr*, socklen_t*), const char* call);

  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

// Opens a non-blocking socket that is closed on exec. TCP sockets do not delay small messages, and
// detect dead connections. Throws SystemError.
ScopedFd open_stream_socket(int family);
void tune_tcp(int socket);

// Functions that return the kernel's information about the peer of a unix socket. peer_process()
// returns 0 for a process in another PID namespace.
bool peer_of_same_user(int socket);
pid_t peer_process(int socket);

}  // namespace adaptive
