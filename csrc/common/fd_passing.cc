#include "common/fd_passing.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#include "common/error.h"
#include "common/socket_io.h"

namespace adaptive {
namespace {

constexpr auto kRetry = std::chrono::milliseconds(2);

// One message travels with the descriptor, one byte comes back.
struct Greeting {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t reserved;
};
constexpr Greeting kGreeting{0x4d41'4644'5041'5353ULL, 1, 0};
constexpr char kReceipt = '+';

struct Address {
  sockaddr_un value{};
  socklen_t length = 0;
  bool abstract = false;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&value); }
};

Address address_of(const std::string& name) {
  Address address;
  address.value.sun_family = AF_UNIX;
  if (name.empty() || name.size() >= sizeof(address.value.sun_path) ||
      name.find('\0') != std::string::npos) {
    throw std::invalid_argument("socket name '" + name + "' must have 1 to " +
                                std::to_string(sizeof(address.value.sun_path) - 1) +
                                " bytes, none of them zero");
  }
  std::memcpy(address.value.sun_path, name.data(), name.size());
  address.abstract = name.front() == '@';
  if (address.abstract) {
    address.value.sun_path[0] = '\0';
  }
  // An abstract name is as long as it is told to be, a path ends with its zero.
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size() +
                                          (address.abstract ? 0 : 1));
  return address;
}

// Removes the socket's file; an abstract name needs no removal.
class ScopedSocketFile {
 public:
  explicit ScopedSocketFile(std::string path) : path_(std::move(path)) {}
  ScopedSocketFile(const ScopedSocketFile&) = delete;
  ScopedSocketFile& operator=(const ScopedSocketFile&) = delete;
  ~ScopedSocketFile() {
    if (!path_.empty()) {
      ::unlink(path_.c_str());
    }
  }

 private:
  std::string path_;
};

ScopedFd open_socket() {
  ScopedFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    throw_errno("socket", "AF_UNIX");
  }
  return socket;
}

// The kernel vouches for these numbers; the peer cannot choose them.
bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    throw_errno("getsockopt", "SO_PEERCRED");
  }
  return peer.uid == ::geteuid();
}

// Room for one descriptor, aligned as the kernel wants it.
union ControlBuffer {
  cmsghdr align;
  char bytes[CMSG_SPACE(sizeof(int))];
};

bool send_greeting(int socket, int fd) {
  Greeting greeting = kGreeting;
  iovec part{&greeting, sizeof(greeting)};
  ControlBuffer control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  if (sent < 0 && errno != EPIPE && errno != ECONNRESET) {
    throw_errno("sendmsg", "SCM_RIGHTS");
  }
  return sent == static_cast<ssize_t>(sizeof(greeting));
}

// One peer from greeting to receipt. False when the peer is of another user or went away.
bool serve(int socket, int fd, const Deadline& deadline, const Tick& tick,
           const std::string& what) {
  if (!same_user(socket) || !send_greeting(socket, fd)) {
    return false;
  }
  wait_ready(socket, POLLIN, deadline, tick, what);
  char receipt = 0;
  return ::recv(socket, &receipt, 1, 0) == 1 && receipt == kReceipt;
}

// Takes the descriptors out of a message, every one owned before any check can throw.
ScopedFd only_descriptor(msghdr& message) {
  ScopedFd result;
  std::size_t found = 0;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      result = ScopedFd(fd);
      ++found;
    }
  }
  if (found != 1 || (message.msg_flags & MSG_CTRUNC) != 0) {
    return ScopedFd();
  }
  return result;
}

ScopedFd receive_greeting(int socket, const std::string& name) {
  Greeting greeting{};
  iovec part{&greeting, sizeof(greeting)};
  ControlBuffer control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  const ssize_t received = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (received < 0) {
    throw_errno("recvmsg", name);
  }
  ScopedFd fd = only_descriptor(message);
  if (!fd || received != static_cast<ssize_t>(sizeof(greeting)) ||
      std::memcmp(&greeting, &kGreeting, sizeof(greeting)) != 0) {
    throw Error("the process listening at '" + name +
                "' did not hand over one descriptor in the expected form: it runs another "
                "version or is another program");
  }
  return fd;
}

// Connects, waiting for the listener to appear: there is no event to sleep on before it does.
ScopedFd connect_to(const std::string& name, const Deadline& deadline, const Tick& tick) {
  const Address address = address_of(name);
  ScopedFd socket = open_socket();
  while (::connect(socket.get(), address.get(), address.length) != 0) {
    const bool not_yet = errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN;
    if (!not_yet && errno != EINTR) {
      throw_errno("connect", name);
    }
    tick();
    if (deadline.expired()) {
      throw DeadlineError("nobody listened at '" + name + "' within the time limit");
    }
    std::this_thread::sleep_for(kRetry);
  }
  return socket;
}

}  // namespace

void send_fd(const std::string& name, int fd, int count, const Deadline& deadline,
             const Tick& tick) {
  if (count < 1) {
    throw std::invalid_argument("count " + std::to_string(count) + " must be at least 1");
  }
  const Address address = address_of(name);
  const ScopedFd listener = open_socket();
  // The file takes its mode from the socket, so there is no moment at which others could connect.
  if (::fchmod(listener.get(), S_IRUSR | S_IWUSR) != 0) {
    throw_errno("fchmod", name);
  }
  if (::bind(listener.get(), address.get(), address.length) != 0) {
    throw_errno("bind", name);
  }
  const ScopedSocketFile file(address.abstract ? std::string() : name);
  if (::listen(listener.get(), std::max(count, 16)) != 0) {
    throw_errno("listen", name);
  }
  for (int served = 0; served < count;) {
    const std::string what = std::to_string(served) + " of " + std::to_string(count) +
                             " processes fetched the descriptor at '" + name +
                             "' within the time limit";
    wait_ready(listener.get(), POLLIN, deadline, tick, what);
    const ScopedFd peer(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!peer) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) {
        continue;
      }
      throw_errno("accept4", name);
    }
    served += serve(peer.get(), fd, deadline, tick, what) ? 1 : 0;
  }
}

ScopedFd recv_fd(const std::string& name, const Deadline& deadline, const Tick& tick) {
  const ScopedFd socket = connect_to(name, deadline, tick);
  if (!same_user(socket.get())) {
    throw Error("the process listening at '" + name +
                "' runs as another user: its memory is not to be trusted");
  }
  wait_ready(socket.get(), POLLIN, deadline, tick,
             "the process listening at '" + name + "' sent nothing within the time limit");
  ScopedFd fd = receive_greeting(socket.get(), name);
  if (::send(socket.get(), &kReceipt, 1, MSG_NOSIGNAL) != 1) {
    throw_errno("send", name);
  }
  return fd;
}

}  // namespace adaptive
