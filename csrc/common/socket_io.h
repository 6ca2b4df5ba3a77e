// Whole transfers on non-blocking sockets, with deadlines; for setting connections up, not for
// payloads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/scoped_fd.h"

namespace adaptive {

// Waits until `fd` has one of `events` or an error, in slices of 100 ms with a tick after each.
// Throws DeadlineError with the text `what`.
void wait_ready(int fd, short events, const Deadline& deadline, const Tick& tick,
                const std::string& what);

// Sends all bytes; the descriptors travel with the first. Throws DeadlineError, SystemError.
void send_all(int socket, const void* data, std::size_t size_bytes, const std::vector<int>& fds,
              const Deadline& deadline, const Tick& tick, const std::string& what);

enum class IoResult { kProgress, kNotNow, kEnd };

// One recvmsg() of at most `room_bytes`. Adds to `received_bytes` and `fds`. Throws SystemError,
// and Error when the kernel had to drop descriptors.
IoResult receive_some(int socket, void* data, std::size_t room_bytes, std::size_t& received_bytes,
                      std::vector<ScopedFd>& fds);

// Receives exactly size_bytes. Throws DeadlineError, SystemError, and Error "closed" at an end.
void receive_all(int socket, void* data, std::size_t size_bytes, std::vector<ScopedFd>& fds,
                 const Deadline& deadline, const Tick& tick, const std::string& what);

// The most descriptors that one record carries.
constexpr std::size_t kMaxRecordFds = 16;

}  // namespace adaptive
