// The receives of a queue pair. They carry no data: each is used up by one write with immediate.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

namespace adaptive::rdma {

// In the id of a completion: it is one of a receive, the rest of the id is the lane.
constexpr std::uint64_t kReceiveId = std::uint64_t{1} << 63;

class Receives {
 public:
  // `most_outstanding`: how many writes with immediate the peer may have sent that were not yet
  // counted by used(). `id`: of their completions.
  Receives(unsigned most_outstanding, std::uint64_t id) noexcept
      : batch_(most_outstanding < 2 ? 1 : most_outstanding / 2),
        depth_(most_outstanding + batch_),
        id_(id) {}

  // Receives the queue pair must have room for.
  std::uint32_t depth() const noexcept { return depth_; }

  // Posts the first ones. Throws SystemError.
  void start(ibv_qp* queue_pair);

  // One completion was found. Posts new ones in batches; false if the device refuses.
  bool used() noexcept {
    if (++num_used_ < batch_) {
      return true;
    }
    const unsigned count = num_used_;
    num_used_ = 0;
    return post(count) == 0;
  }

 private:
  int post(unsigned count) noexcept;

  unsigned batch_;
  unsigned depth_;
  std::uint64_t id_;
  unsigned num_used_ = 0;
  ibv_qp* queue_pair_ = nullptr;
};

}  // namespace adaptive::rdma
