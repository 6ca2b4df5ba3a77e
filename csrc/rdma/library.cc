// The verbs library, which is opened at the first call instead of when the extension is imported.
// The same build therefore runs on nodes with and without libibverbs.
//
// Each function that the rest of `rdma/` links against is defined here and calls the library's
// function. The definitions are hidden from other modules. The inline functions of
// `infiniband/verbs.h` (posting, polling) use the device's function table and do not need this
// file. If the library is missing, the functions throw an Error that names the package to install.
#ifdef MEGATRON_ADAPTIVE_RDMA

#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <string>

#include "common/error.h"

// The header defines these names as macros too; this file needs the functions.
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

namespace adaptive::rdma {
namespace {

constexpr const char* kLibrary = "libibverbs.so.1";

void* open_library() {
  // the providers look up symbols in it
  void* const opened = ::dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
  if (opened == nullptr) {
    const char* const words = ::dlerror();
    throw Error("RDMA needs the verbs library, which cannot be opened (" +
                std::string(words == nullptr ? kLibrary : words) +
                "): install libibverbs1 and ibverbs-providers (rdma-core elsewhere)");
  }
  return opened;
}

// Returns the library's newest version of the function with that name.
template <typename Function>
Function* find(const char* name) {
  // stays open; after a failure, the next call tries again
  static void* const library = open_library();
  void* const found = ::dlsym(library, name);
  if (found == nullptr) {
    throw Error(std::string(kLibrary) + " has no " + name + ": it is too old for this build");
  }
  return reinterpret_cast<Function*>(found);
}

}  // namespace
}  // namespace adaptive::rdma

// clang-format off: it mistakes the stars in these parameters for products
#define ADAPTIVE_VERB(result, name, parameters, arguments)                           \
  result name parameters {                                                           \
    static auto* const function = adaptive::rdma::find<result parameters>(#name);    \
    return function arguments;                                                       \
  }

extern "C" {
ADAPTIVE_VERB(ibv_device**, ibv_get_device_list, (int* count), (count))
ADAPTIVE_VERB(void, ibv_free_device_list, (ibv_device** list), (list))
ADAPTIVE_VERB(const char*, ibv_get_device_name, (ibv_device* device), (device))
ADAPTIVE_VERB(ibv_context*, ibv_open_device, (ibv_device* device), (device))
ADAPTIVE_VERB(int, ibv_close_device, (ibv_context* context), (context))
ADAPTIVE_VERB(int, ibv_fork_init, (), ())
ADAPTIVE_VERB(int, ibv_query_device, (ibv_context* context, ibv_device_attr* out), (context, out))
ADAPTIVE_VERB(int, ibv_query_port,
              (ibv_context* context, std::uint8_t port, _compat_ibv_port_attr* out),
              (context, port, out))
ADAPTIVE_VERB(int, ibv_query_gid,
              (ibv_context* context, std::uint8_t port, int index, ibv_gid* out),
              (context, port, index, out))
ADAPTIVE_VERB(ibv_pd*, ibv_alloc_pd, (ibv_context* context), (context))
ADAPTIVE_VERB(int, ibv_dealloc_pd, (ibv_pd* domain), (domain))
ADAPTIVE_VERB(ibv_mr*, ibv_reg_mr, (ibv_pd* domain, void* start, std::size_t length, int access),
              (domain, start, length, access))
ADAPTIVE_VERB(ibv_mr*, ibv_reg_mr_iova2,
              (ibv_pd* domain, void* start, std::size_t length, std::uint64_t iova,
               unsigned int access),
              (domain, start, length, iova, access))
ADAPTIVE_VERB(int, ibv_dereg_mr, (ibv_mr* region), (region))
ADAPTIVE_VERB(ibv_comp_channel*, ibv_create_comp_channel, (ibv_context* context), (context))
ADAPTIVE_VERB(int, ibv_destroy_comp_channel, (ibv_comp_channel* channel), (channel))
ADAPTIVE_VERB(ibv_cq*, ibv_create_cq,
              (ibv_context* context, int entries, void* of_user, ibv_comp_channel* channel,
               int vector),
              (context, entries, of_user, channel, vector))
ADAPTIVE_VERB(int, ibv_destroy_cq, (ibv_cq* queue), (queue))
ADAPTIVE_VERB(int, ibv_get_cq_event, (ibv_comp_channel* channel, ibv_cq** queue, void** of_user),
              (channel, queue, of_user))
ADAPTIVE_VERB(void, ibv_ack_cq_events, (ibv_cq* queue, unsigned int count), (queue, count))
ADAPTIVE_VERB(ibv_qp*, ibv_create_qp, (ibv_pd* domain, ibv_qp_init_attr* wanted), (domain, wanted))
ADAPTIVE_VERB(int, ibv_modify_qp, (ibv_qp* pair, ibv_qp_attr* wanted, int mask),
              (pair, wanted, mask))
ADAPTIVE_VERB(int, ibv_destroy_qp, (ibv_qp* pair), (pair))
}

#undef ADAPTIVE_VERB
// clang-format on

#endif
