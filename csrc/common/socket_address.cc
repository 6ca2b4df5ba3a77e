#include "common/socket_address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "common/error.h"

namespace adaptive {
namespace {

void set_option(int socket, int level, int option, int value, const char* name) {
  if (::setsockopt(socket, level, option, &value, sizeof(value)) != 0) {
    throw_errno("setsockopt", name);
  }
}

ucred credentials_of(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    throw_errno("getsockopt", "SO_PEERCRED");
  }
  return peer;
}

std::string without_brackets(const std::string& host) {
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

}  // namespace

SocketAddress SocketAddress::on_unix(const std::string& name) {
  sockaddr_un value{};
  if (name.size() < 2 || name.front() != '@' || name.size() >= sizeof(value.sun_path)) {
    throw std::invalid_argument("socket name '" + name + "' must be '@' and 1 to " +
                                std::to_string(sizeof(value.sun_path) - 2) + " bytes");
  }
  value.sun_family = AF_UNIX;
  std::memcpy(value.sun_path + 1, name.data() + 1, name.size() - 1);
  SocketAddress address;
  address.length_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  std::memcpy(&address.storage_, &value, sizeof(value));
  return address;
}

SocketAddress SocketAddress::on_tcp(const std::string& host, int port) {
  if (port < 0 || port > 65535) {
    throw std::invalid_argument("port " + std::to_string(port) + " must be within 0 and 65535");
  }
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* raw = nullptr;
  const int code =
      ::getaddrinfo(without_brackets(host).c_str(), std::to_string(port).c_str(), &hints, &raw);
  if (code != 0) {
    throw std::invalid_argument(
        "host '" + host + "' must be a numeric IPv4 or IPv6 address: " + ::gai_strerror(code));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> found(raw, &::freeaddrinfo);
  SocketAddress address;
  address.length_ = found->ai_addrlen;
  std::memcpy(&address.storage_, found->ai_addr, found->ai_addrlen);
  return address;
}

SocketAddress SocketAddress::asked(int socket, int (*ask)(int, sockaddr*, socklen_t*),
                                   const char* call) {
  SocketAddress address;
  address.length_ = sizeof(address.storage_);
  if (ask(socket, reinterpret_cast<sockaddr*>(&address.storage_), &address.length_) != 0) {
    throw_errno(call, "descriptor " + std::to_string(socket));
  }
  return address;
}

SocketAddress SocketAddress::local_of(int socket) {
  return asked(socket, &::getsockname, "getsockname");
}

SocketAddress SocketAddress::remote_of(int socket) {
  return asked(socket, &::getpeername, "getpeername");
}

std::string SocketAddress::text() const {
  if (family() == AF_UNIX) {
    const char* path = reinterpret_cast<const char*>(&storage_) + offsetof(sockaddr_un, sun_path);
    const std::size_t size = length_ - offsetof(sockaddr_un, sun_path);
    return size < 2 ? "an unnamed socket" : "@" + std::string(path + 1, size - 1);
  }
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  if (::getnameinfo(get(), length_, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "an unknown address";
  }
  const std::string name = family() == AF_INET6 ? "[" + std::string(host) + "]" : host;
  return name + ":" + port;
}

ScopedFd open_stream_socket(int family) {
  ScopedFd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    throw_errno("socket", "family " + std::to_string(family));
  }
  if (family != AF_UNIX) {
    tune_tcp(socket.get());
  }
  return socket;
}

void tune_tcp(int socket) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE");
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 10, "TCP_KEEPIDLE");
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5, "TCP_KEEPINTVL");
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 4, "TCP_KEEPCNT");
}

bool peer_of_same_user(int socket) {
  return credentials_of(socket).uid == ::geteuid();
}

pid_t peer_process(int socket) {
  return credentials_of(socket).pid;
}

}  // namespace adaptive
