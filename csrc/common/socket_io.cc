#include "common/socket_io.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "common/error.h"

namespace adaptive {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(100);

// Has room for twice the allowed number of descriptors, so that excess ones are counted and closed
// instead of truncated.
union ControlBuffer {
  cmsghdr align;
  char bytes[CMSG_SPACE(2 * kMaxRecordFds * sizeof(int))];
};

bool would_block(int code) {
  return code == EAGAIN || code == EWOULDBLOCK || code == EINTR;
}

// Takes ownership of all descriptors of a message before any check can throw.
void take_descriptors(msghdr& message, std::vector<ScopedFd>& fds) {
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
}

void attach_descriptors(msghdr& message, ControlBuffer& control, const std::vector<int>& fds) {
  const std::size_t size_bytes = fds.size() * sizeof(int);
  message.msg_control = control.bytes;
  message.msg_controllen = CMSG_SPACE(size_bytes);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(size_bytes);
  std::memcpy(CMSG_DATA(header), fds.data(), size_bytes);
}

}  // namespace

void wait_ready(int fd, short events, const Deadline& deadline, const Tick& tick,
                const std::string& what) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, deadline.at_most(kSlice).remaining_ms());
    if (ready > 0) {
      return;
    }
    if (ready < 0 && errno != EINTR) {
      throw_errno("poll", what);
    }
    if (tick) {
      tick();
    }
    if (deadline.expired()) {
      throw DeadlineError(what);
    }
  }
}

void send_all(int socket, const void* data, std::size_t size_bytes, const std::vector<int>& fds,
              const Deadline& deadline, const Tick& tick, const std::string& what) {
  if (fds.size() > kMaxRecordFds) {
    throw std::invalid_argument(std::to_string(fds.size()) + " descriptors are more than the " +
                                std::to_string(kMaxRecordFds) + " of one record");
  }
  const char* bytes = static_cast<const char*>(data);
  for (std::size_t sent_bytes = 0; sent_bytes < size_bytes;) {
    iovec part{const_cast<char*>(bytes + sent_bytes), size_bytes - sent_bytes};
    ControlBuffer control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (sent_bytes == 0 && !fds.empty()) {
      attach_descriptors(message, control, fds);
    }
    const ssize_t count = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (count >= 0) {
      sent_bytes += static_cast<std::size_t>(count);
    } else if (would_block(errno)) {
      wait_ready(socket, POLLOUT, deadline, tick, what);
    } else {
      throw_errno("sendmsg", what);
    }
  }
}

IoResult receive_some(int socket, void* data, std::size_t room_bytes, std::size_t& received_bytes,
                      std::vector<ScopedFd>& fds) {
  iovec part{data, room_bytes};
  ControlBuffer control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  fds.reserve(fds.size() + 2 * kMaxRecordFds);  // now, so that nothing throws later
  const ssize_t count = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (count < 0) {
    if (would_block(errno)) {
      return IoResult::kNotNow;
    }
    throw_errno("recvmsg", "descriptor " + std::to_string(socket));
  }
  take_descriptors(message, fds);
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    throw Error(
        "descriptors were dropped on their way: either more came than a record carries, or "
        "this process has too many open (ulimit -n)");
  }
  received_bytes += static_cast<std::size_t>(count);
  return count == 0 ? IoResult::kEnd : IoResult::kProgress;
}

void receive_all(int socket, void* data, std::size_t size_bytes, std::vector<ScopedFd>& fds,
                 const Deadline& deadline, const Tick& tick, const std::string& what) {
  for (std::size_t received_bytes = 0; received_bytes < size_bytes;) {
    switch (receive_some(socket, static_cast<char*>(data) + received_bytes,
                         size_bytes - received_bytes, received_bytes, fds)) {
      case IoResult::kProgress:
        break;
      case IoResult::kNotNow:
        wait_ready(socket, POLLIN, deadline, tick, what);
        break;
      case IoResult::kEnd:
        throw Error("closed by the peer after " + std::to_string(received_bytes) + " of " +
                    std::to_string(size_bytes) + " bytes: " + what);
    }
  }
}

}  // namespace adaptive
