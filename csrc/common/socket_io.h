// Functions that transfer a given number of bytes on a non-blocking socket before a deadline. Used
// to set up connections, not for payloads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "common/scoped_fd.h"

namespace adaptive {

// Waits until `fd` has one of `events` or an error. Calls `tick` every 100 ms. Throws DeadlineError
// with the message `what`.
void wait_ready(int fd, short events, const Deadline& deadline, const Tick& tick,
                const std::string& what);

// Sends all bytes, and the descriptors together with the first byte. Throws DeadlineError,
// SystemError.
void send_all(int socket, const void* data, std::size_t size_bytes, const std::vector<int>& fds,
              const Deadline& deadline, const Tick& tick, const std::string& what);

enum class IoResult { kProgress, kNotNow, kEnd };

// Calls recvmsg() once, for at most `room_bytes`. Adds the number of received bytes to
// `received_bytes` and appends the descriptors to `fds`. Throws SystemError, and Error if the
// kernel had to drop descriptors.
IoResult receive_some(int socket, void* data, std::size_t room_bytes, std::size_t& received_bytes,
                      std::vector<ScopedFd>& fds);

// Receives exactly size_bytes. Throws DeadlineError, SystemError, and Error ("closed") if the peer
// closed the connection.
void receive_all(int socket, void* data, std::size_t size_bytes, std::vector<ScopedFd>& fds,
                 const Deadline& deadline, const Tick& tick, const std::string& what);

// Maximum number of descriptors in a record.
constexpr std::size_t kMaxRecordFds = 16;

}  // namespace adaptive
