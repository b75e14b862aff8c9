// For every processor: what the compiler may assume without being told, which is SSE2 on x86-64 and NEON on arm64.
#define HVD_LANES 4
#define HVD_SMALLER kBaseline
#include "core.h"

namespace hvd_dyncomp {

const Variant kBaseline = {"baseline", [] { return true; }, encode, decode, reduce};

}  // namespace hvd_dyncomp
