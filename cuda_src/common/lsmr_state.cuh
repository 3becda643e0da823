// The scalars of LSMR for one right-hand side: plane rotations, norms, condition estimate and stopping tests.
//
// The formulas are those of Fong and Saunders, "LSMR: An iterative algorithm for sparse least-squares problems" (SIAM
// J. Sci. Comput. 33, 2011), in SciPy's arrangement and with its order of tests. Everything is float64, counters too,
// so that the host reads one plain array.
#pragma once
#include "numeric.cuh"

namespace rawops {

enum LsmrPhase : int { kStart, kRun, kStopped };
enum LsmrStop : int {
    kSolve = 1,
    kLeast = 2,
    kCond = 3,
    kSolveMachine = 4,
    kLeastMachine = 5,
    kCondMachine = 6,
    kMaxiter = 7
};

// The sum of COUNT numbers `step` apart, in a tree: a chain of additions in float64 is long.
template <int COUNT> __device__ inline double tree_sum(const double* numbers, int step) {
    if constexpr (COUNT == 1) return numbers[0];
    else return tree_sum<COUNT / 2>(numbers, step) + tree_sum<COUNT / 2>(numbers + COUNT / 2 * step, step);
}

struct LsmrSettings {
    double damp, atol, btol, ctol, maxiter;
};

// The vectors are kept unnormalised: the array of u is tau * beta times the unit vector, that of v sigma * alpha times,
// and what would divide them goes into the scalars of the next product. tau and sigma are powers of two that keep both
// near norm 1, so that products with a float32 matrix of norm 1e-30 or 1e30 do not underflow or overflow.
struct LsmrScalars {
    double istop, itn, normr, normar, norma, conda, normx, phase;  // the host reads these
    double forward_alpha, forward_beta;                            // u = forward_alpha A v + forward_beta u
    double adjoint_alpha, adjoint_beta;                            // v = adjoint_alpha A^H u + adjoint_beta v
    double normb, alpha, beta, tau, sigma, untested, clears_x;
    double over_u, over_v;  // one over the norms of the arrays
    double zetabar, alphabar, rho, rhobar, cbar, sbar;
    double betadd, betad, rhodold, tautildeold, thetatilde, zeta, d;
    double norma2, maxrbar, minrbar, rhotemp;
};

struct LsmrState {
    LsmrSettings settings;
    LsmrScalars now;   // written by lsmr_scalars, read by everything up to lsmr_update
    LsmrScalars next;  // written by lsmr_update, which has many readers of `now`
};

// The scalars of products that have all right-hand sides in one launch: alpha 1 and beta 0 until every column has
// stopped, then 0 and 1, which leave nothing to do.
struct LsmrGate {
    double alpha, beta;
    unsigned int stopped, unused;
};

static_assert(sizeof(LsmrState) == 81 * sizeof(double), "_lsmr_engine.py knows where the scalars lie");

// How lsmr_update moves the vectors.
struct LsmrMove {
    double hbar, x, h, v;  // factors: hbar = h + (hbar) hbar, x += (x) hbar, h = (v) v + (h) h
};

struct Rotation {
    double c, s, r, over;  // over is 1 / r
};

struct Norm {
    double value, over;  // over is what normalises a vector of this norm
};

__device__ inline double sign_of(double x) { return x > 0 ? 1 : x < 0 ? -1 : x; }

// The power of two that brings a norm to 1..2.
__device__ inline double power_of_two(double norm) {
    const int64_t exponent = __double_as_longlong(norm) >> 52 & 0x7ff;
    return exponent == 0 || exponent >= 0x7fe ? 1 : __longlong_as_double((0x7fe - exponent) << 52);
}

// The plane rotation that makes (r, 0) of (a, b), r >= 0. One root and no division, since a single thread waits for it.
__device__ inline Rotation rotate(double a, double b) {
    if (b == 0) return {sign_of(a), 0, fabs(a), 1 / fabs(a)};
    if (a == 0) return {0, sign_of(b), fabs(b), 1 / fabs(b)};
    const double scale = power_of_two(fmax(fabs(a), fabs(b)));
    a *= scale, b *= scale;
    const double square = a * a + b * b, inverse = rsqrt(square);
    return {a * inverse, b * inverse, square * inverse * power_of_two(scale), inverse * scale};
}

// The norm of a vector from the sum of its squares. One of norm 0 stays as it is; what overflowed is NaN from here on.
__device__ inline Norm norm_of(double squares) {
    if (squares == 0) return {0, 1};
    if (!(squares < 1.0 / 0.0)) return {squares, 0.0 / 0.0};
    const double over = rsqrt(squares);
    return {squares * over, over};
}

// Products with these scalars change nothing and read no matrix.
__device__ inline void freeze(LsmrScalars& s) {
    s.phase = kStopped, s.untested = 0;
    s.forward_alpha = s.adjoint_alpha = 0, s.forward_beta = s.adjoint_beta = 1;
}

// After u = b - A x0 and before v = A^H u. The first product with the forward scalars only scales u.
__device__ inline void begin(LsmrState& state, const LsmrSettings& settings, double normb, const Norm& beta) {
    LsmrScalars s = {};
    s.phase = kStart, s.normb = normb, s.beta = beta.value;
    s.tau = s.forward_beta = power_of_two(s.beta);
    s.over_u = beta.over * power_of_two(s.tau);
    s.adjoint_alpha = s.beta > 0 ? s.over_u : 0;
    state.settings = settings, state.now = state.next = s;
}

// The scalars of u = A v - alpha u.
__device__ inline void aim_u(LsmrScalars& s) {
    s.tau = power_of_two(s.alpha);
    s.forward_alpha = s.tau * s.over_v, s.forward_beta = -s.tau * s.alpha * s.over_u;
}

// The scalars of v = A^H u - beta v, from the norm of the array of u. Where u vanished, v and its norm stay.
__device__ inline void aim_v(LsmrScalars& s, const Norm& norm_u) {
    s.beta = norm_u.value * power_of_two(s.tau);
    s.over_u = norm_u.over;
    s.adjoint_alpha = 0, s.adjoint_beta = 1;
    if (!(s.beta > 0)) return;
    s.sigma = power_of_two(s.alpha);
    s.adjoint_alpha = s.sigma * s.over_u, s.adjoint_beta = -s.sigma * s.beta * s.over_v;
}

// After the first v: the state before iteration 1, or the end where there is nothing to do.
__device__ inline LsmrMove prepare(LsmrScalars& s, const LsmrSettings& settings, const Norm& norm_v) {
    s.alpha = s.beta > 0 ? norm_v.value : 0;
    s.zetabar = s.normar = s.alpha * s.beta;
    s.alphabar = s.alpha;
    s.rho = s.rhobar = s.cbar = s.rhodold = s.conda = 1;
    s.betadd = s.normr = s.beta;
    s.norma2 = s.alpha * s.alpha, s.norma = s.alpha, s.minrbar = 1e100;
    s.sigma = power_of_two(s.alpha), s.over_v = s.beta > 0 ? norm_v.over * power_of_two(s.sigma) : 1;
    aim_u(s);
    s.phase = kRun;
    s.clears_x = s.normar != 0 && s.normb == 0;
    if (s.normar == 0 || s.normb == 0 || !(settings.maxiter > 0)) freeze(s);
    return {0, 0, 0, s.sigma * s.over_v};
}

// What one iteration leaves for its estimates.
struct LsmrTurn {
    LsmrMove move;
    Rotation hat, q;
    double thetabar, rhobarold, zetaold;
};

// What of a turn needs no norm of v.
__device__ inline LsmrTurn first_turn(const LsmrScalars& s, double damp) {
    LsmrTurn t;
    t.hat = rotate(s.alphabar, damp), t.q = rotate(t.hat.r, s.beta);
    t.thetabar = s.sbar * t.q.r, t.rhobarold = s.rhobar, t.zetaold = s.zeta;
    t.move.hbar = -(t.thetabar * t.q.r / (s.rho * s.rhobar));
    return t;
}

// The rest, after the new v, from the norm of its array: the last rotation that x needs, and the scalars of the next u.
// A single thread is waited for: no division here.
__device__ inline void turn(LsmrScalars& s, LsmrTurn& t, const Norm& norm_v) {
    if (s.beta > 0) s.alpha = norm_v.value * power_of_two(s.sigma), s.over_v = norm_v.over;
    const double thetanew = t.q.s * s.alpha;
    s.rho = t.q.r, s.alphabar = t.q.c * s.alpha, s.rhotemp = s.cbar * s.rho;
    const Rotation bar = rotate(s.rhotemp, thetanew);
    s.cbar = bar.c, s.sbar = bar.s, s.rhobar = bar.r;
    s.zeta = s.cbar * s.zetabar, s.zetabar = -s.sbar * s.zetabar;
    t.move.x = s.zeta * t.q.over * bar.over, t.move.h = -thetanew * t.q.over, t.move.v = s.over_v;
    aim_u(s);
}

// After `turn`: the norms of r, A^H r and A, and the condition of A.
__device__ inline void estimate(LsmrScalars& s, const LsmrTurn& t) {
    const double betaacute = t.hat.c * s.betadd, betacheck = -t.hat.s * s.betadd, betahat = t.q.c * betaacute;
    s.betadd = -t.q.s * betaacute;
    const Rotation tilde = rotate(s.rhodold, t.thetabar);
    s.betad = -tilde.s * s.betad + tilde.c * betahat;
    s.tautildeold = (t.zetaold - s.thetatilde * s.tautildeold) * tilde.over;
    s.thetatilde = tilde.s * s.rhobar, s.rhodold = tilde.c * s.rhobar;
    const double taud = (s.zeta - s.thetatilde * s.tautildeold) / s.rhodold, gap = s.betad - taud;
    s.d += betacheck * betacheck;
    s.normr = sqrt(s.d + gap * gap + s.betadd * s.betadd);
    s.normar = fabs(s.zetabar);

    s.norma2 += s.beta * s.beta;
    s.norma = sqrt(s.norma2);
    s.norma2 += s.alpha * s.alpha;
    s.itn += 1;
    s.maxrbar = t.rhobarold > s.maxrbar ? t.rhobarold : s.maxrbar;
    if (s.itn > 1) s.minrbar = t.rhobarold < s.minrbar ? t.rhobarold : s.minrbar;
    s.conda = (s.rhotemp > s.maxrbar ? s.rhotemp : s.maxrbar) / (s.rhotemp < s.minrbar ? s.rhotemp : s.minrbar);
    s.untested = 1;
}

// After the new x: the stopping tests, by a whole warp, which divides once for all of them. Returns the stop code in
// all lanes. A comparison with NaN is false, so NaN only ever stops at maxiter.
__device__ inline double judge(const LsmrScalars& s, const LsmrSettings& settings, double normx) {
    const int lane = threadIdx.x % kWarpSize;
    const double product = s.norma * s.normr;
    const double over = lane == 0 ? s.norma * normx : lane == 1 ? s.normr : lane == 2 ? s.normar : 1;
    const double quotient = over / (lane < 2 ? s.normb : lane == 2 ? product : s.conda);
    const double scale = __shfl_sync(~0u, quotient, 0), test1 = __shfl_sync(~0u, quotient, 1);
    const double least = __shfl_sync(~0u, quotient, 2), test3 = __shfl_sync(~0u, quotient, 3);
    const double test2 = product != 0 ? least : 1.0 / 0.0;
    const double t1 = test1 / (1 + scale), rtol = settings.btol + settings.atol * scale;
    double istop = s.istop;
    if (s.itn >= settings.maxiter) istop = kMaxiter;
    if (1 + test3 <= 1) istop = kCondMachine;
    if (1 + test2 <= 1) istop = kLeastMachine;
    if (1 + t1 <= 1) istop = kSolveMachine;
    if (test3 <= settings.ctol) istop = kCond;
    if (test2 <= settings.atol) istop = kLeast;
    if (test1 <= rtol) istop = kSolve;
    return istop;
}

// Takes the verdict in.
__device__ inline void close(LsmrScalars& s, double normx, double istop) {
    s.normx = normx, s.istop = istop, s.untested = 0;
}

// A row of the history, which is a ring of rows (columns, 5).
__device__ inline void record(const LsmrScalars& s, double* __restrict__ history, int rows, int column, int columns) {
    double* row = history + ((int64_t(s.itn) - 1) % rows * columns + column) * 5;
    row[0] = s.normr, row[1] = s.normar, row[2] = s.norma, row[3] = s.conda, row[4] = s.normx;
}

}  // namespace rawops
