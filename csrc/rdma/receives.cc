#ifdef MEGATRON_ADAPTIVE_RDMA

#include "rdma/receives.h"

#include <algorithm>
#include <array>
#include <string>

#include "common/error.h"

namespace adaptive::rdma {

void Receives::start(ibv_qp* queue_pair) {
  queue_pair_ = queue_pair;
  const int code = post(depth_);
  if (code != 0) {
    throw SystemError("ibv_post_recv", std::to_string(depth_) + " receives", code);
  }
}

int Receives::post(unsigned count) noexcept {
  std::array<ibv_recv_wr, 32> requests{};
  while (count > 0) {
    const unsigned now = std::min<unsigned>(count, requests.size());
    for (unsigned i = 0; i < now; ++i) {
      requests[i].wr_id = id_;
      requests[i].next = i + 1 < now ? &requests[i + 1] : nullptr;
    }
    ibv_recv_wr* refused = nullptr;
    const int code = ::ibv_post_recv(queue_pair_, requests.data(), &refused);
    if (code != 0) {
      return code;
    }
    count -= now;
  }
  return 0;
}

}  // namespace adaptive::rdma

#endif
